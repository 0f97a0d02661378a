"""A drafting method defined in this file runs in both executors. It drafts a block with one table look-up per cycle."""

from __future__ import annotations

import pytest
import torch

from fledge.engine.build import Speculation, build_engine, paged_kv
from fledge.engine.engine import Engine
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.engine.kv_pool import PagePool
from fledge.errors import UserError
from fledge.sampling import SamplingParams
from fledge.speculation.controller import SpeculationController
from fledge.speculation.depth import DepthPolicy
from fledge.speculation.methods.base import Drafted
from fledge.speculation.verification import Draft
from tests.oracle import CPU, eager_engine
from tests.tiny import tiny_decoder


class BlockDrafter:
    """Drafts the tokens in the last token's row of a table."""

    taps, knows_confidence = (), False

    def __init__(self, table_VD: torch.Tensor) -> None:
        self.table_VD, self.depth = table_VD, DepthPolicy(table_VD.shape[1])
        self.lookahead, self.description = self.depth.limit + 1, "block look-up"

    def draft(self, spans, taps):
        drafts = []
        for span in spans:
            block = self.table_VD[span.request.tokens[-1], : span.max_draft_tokens].tolist()
            drafts.append(Draft.chain(block, [1.0] * len(block)))
        return drafts

    def forget(self, request):
        pass

    def captured(self, batch, max_positions, max_depth):
        return CapturedBlock(batch, self.table_VD)


class CapturedBlock:
    taps, row_state, cache = (), (), None
    follows_plain_cycles = adjusts_drafts = True
    reads_text = False

    def __init__(self, batch, table_VD):
        self.batch, self.table_VD = batch, table_VD

    def num_drafted(self, depth):
        return depth

    def prefill(self, aux, following_N, meta, rows_S, last_S):
        pass

    def draft(self, pages_BP, depth, *, sampled):
        size = len(pages_BP)
        tokens = self.batch.rows.token[:size].long()
        self.batch.drafts[:size, :depth].copy_(self.table_VD[tokens, :depth])
        return Drafted()

    def sync(self, aux, accepted, pages_BP):
        pass


def captured_engine(decoder, drafter) -> Engine:
    config = CPU.resolve(decoder.config).with_cache(decoder.config)
    pool = PagePool(-(-config.kv_cache_tokens // config.page_size), config.page_size)
    shape, controller = decoder.config, SpeculationController(drafter.depth.limit)
    cache = paged_kv(config, pool, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    executor = CudaGraphExecutor(decoder, config, pool, cache, controller, drafter, capture=False)
    return Engine(config, executor, pool, controller, drafter=drafter)


def answers(engine: Engine) -> list:
    options = [{}, {"temperature": 0.8, "seed": 4}, {"frequency_penalty": 0.7}, {"logprobs": 2}]
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **more}) for more in options]
    requests = [engine.add_request([7, 9, 40 + index], one) for index, one in enumerate(params)]
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    return requests


def test_a_custom_method_runs_in_both_executors():
    decoder = tiny_decoder(5)
    wanted = [request.answer for request in answers(build_engine(decoder, Speculation("none"), CPU))]
    # The table holds what followed each token in these answers: some drafts are right, some are wrong.
    table = torch.randint(0, decoder.config.vocab_size, (decoder.config.vocab_size, 4))
    for answer in wanted:
        for place in range(len(answer) - 4):
            table[answer[place]] = torch.tensor(answer[place + 1 : place + 5])
    accepted = []
    for engine in (
        eager_engine(decoder, BlockDrafter(table), SpeculationController(4)),
        captured_engine(decoder, BlockDrafter(table)),
    ):
        found = answers(engine)
        assert [request.answer for request in found] == wanted
        accepted.append([request.stats.accepted for request in found])
    assert accepted[0] == accepted[1]
    assert all(0 < count < 30 for count in accepted[0])


def test_a_method_without_a_captured_part_is_refused_by_name():
    drafter = BlockDrafter(torch.zeros(128, 2, dtype=torch.long))
    drafter.captured = lambda batch, max_positions, max_depth: None
    with pytest.raises(UserError, match=r"block look-up: .* does not run in CUDA graphs"):
        captured_engine(tiny_decoder(5), drafter)
