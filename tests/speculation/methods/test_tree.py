"""Draft trees as fixed-shape tensors equal the eager executor's trees and their verification."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fledge.config import MLAConfig
from fledge.errors import UserError
from fledge.kernels.accept import RowState, accept
from fledge.kernels.attention.decode_attention import decode_attention
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.compact_path import compact_path
from fledge.kernels.ngram import ngram_drafts, ngram_drafts_reference
from fledge.kernels.sample import PartialArgmax
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Attend
from fledge.ops.torch_ops import TorchOps
from fledge.sampling import SamplingParams
from fledge.speculation.depth import DepthPolicy, TreeShape
from fledge.speculation.methods.base import AcceptedSpan
from fledge.speculation.methods.eagle import EagleSpeculator
from fledge.speculation.methods.tree import (
    DraftStep,
    Frontier,
    TreeDraft,
    accept_tree,
    along_path,
    check_shape,
    collapse,
    grow_tree,
    row_depths,
    tail_bits,
    tree_attention,
    verify_attention,
)
from fledge.speculation.verification import Draft, verify
from tests.tiny import tiny_drafter, tiny_drafter_config

PAGE = 4
LENGTHS = [1, 6, 11, 4]  # accepted pairs of each sequence


def attend_over(cache: PagedKV, page_table_BP: Tensor, meta: AttentionMetadata) -> Attend:
    """Stores the new keys and values, then attends, as `rope_cache` and `decode_attention` do on a GPU."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        slots, batch = meta.slots_N, len(meta.lengths_B)
        stored = slots >= 0
        for storage, new in ((cache.keys, k), (cache.values, v)):
            storage[layer][:, slots[stored]] = new[stored].transpose(0, 1)
        return decode_attention(
            q.view(batch, -1, *q.shape[1:]),
            cache.keys[layer],
            cache.values[layer],
            page_table_BP,
            meta.lengths_B,
            cache.page_size,
            tail_bits_BT=meta.tail_bits_BT,
            tail=meta.tail,
            positions_BT=meta.positions_N.view(batch, -1),
            window=window,
        ).flatten(0, 1)

    return attend


def draft_step(network: EagleDrafter, cache: PagedKV, page_table_BP: Tensor, starts_B: Tensor, active_B: Tensor) -> DraftStep:
    def step(frontier: Frontier) -> tuple[Tensor, Tensor]:
        where = (frontier.offset, frontier.tail_bits_BW, frontier.tail, page_table_BP, cache.page_size)
        meta = tree_attention(starts_B, active_B, *where)
        inputs = (frontier.tokens_BW.flatten(), frontier.h_BWD.flatten(0, 1), meta.positions_N)
        hidden, h = network(*inputs, attend_over(cache, page_table_BP, meta))
        return tuple(x.unflatten(0, frontier.tokens_BW.shape) for x in (network.logits(hidden), h))

    return step


def speculator(depth: int, shape: TreeShape, seed: int, **settings) -> EagleSpeculator:
    config = tiny_drafter_config(own_embedding=True, own_head=True, **settings)
    network = tiny_drafter(config, seed)
    pages = len(LENGTHS) * 30
    cache = PagedKV(config.num_layers, config.num_kv_heads, config.head_dim, pages, PAGE, torch.float32, "cpu")
    cache.take_memory()
    host = EagleSpeculator(network, cache, DepthPolicy(depth), shape)
    host.ops = TorchOps(host.cache, host.network.rotary)  # both implementations sum in the same order
    return host


def accepted_spans(host: EagleSpeculator, depth: int) -> tuple[list[AcceptedSpan], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random texts with their pairs in the drafter's cache: spans, logits and states of the last pairs, and page tables."""
    tables = torch.randperm(len(LENGTHS) * 30).view(len(LENGTHS), 30)
    spans, row = [], 0
    for length, table in zip(LENGTHS, tables.tolist(), strict=True):
        tokens = torch.randint(0, host.network.config.vocab_size, (length + 1,)).tolist()
        sequence = SimpleNamespace(tokens=tokens, pages=table, params=SamplingParams(temperature=0), generator=None)
        spans.append(AcceptedSpan(sequence, 0, list(range(row, row + length)), depth))
        row += length
    config = host.network.config
    hidden, h = host.sync(spans, [torch.randn(row, config.target_hidden_size) for _ in config.aux_layer_ids])
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    return spans, host.network.logits(hidden[last]), h[last], tables.int()


def bits_of(mask: torch.Tensor) -> list[int]:
    return [sum(1 << place for place, seen in enumerate(row) if seen) for row in mask.tolist()]


@pytest.mark.parametrize(
    ("width", "nodes", "depth", "settings"),
    [
        (4, 12, 4, {}),
        (3, 63, 6, {"norm_output": True}),
        (10, 60, 5, {"draft_vocab_size": 64}),
        (1, 5, 5, {}),
        (4, 63, 1, {}),
        (2, 3, 7, {"window": 5}),
        (5, 20, 3, {"draft_vocab_size": 3}),
        (4, 16, 4, {"mla": MLAConfig(8, 8, 4, 8)}),
    ],
)
def test_trees_equal_the_eager_executors(width, nodes, depth, settings):
    shape = TreeShape(width, nodes)
    for seed in range(3):
        host = speculator(depth, shape, seed, **settings)
        spans, logits, h, tables = accepted_spans(host, depth)
        starts = torch.tensor(LENGTHS, dtype=torch.int32)
        cache = PagedKV(1, *host.cache.keys.shape[1:2], host.cache.keys.shape[-1], tables.numel(), PAGE, torch.float32, "cpu")
        cache.keys.copy_(host.cache.keys)
        cache.values.copy_(host.cache.values)
        expected = host.grow_trees(spans, logits, h)

        step = draft_step(host.network, cache, tables, starts, torch.ones(len(starts), dtype=torch.int32))
        covered = math.log(host.coverage.covered)
        tree = grow_tree(logits, h, step, shape, depth, target_ids_V=host.target_ids, log_covered=covered)
        assert tree.tokens_BN.shape[1] == shape.num_nodes(depth, logits.shape[-1])
        for row, draft in enumerate(expected):
            assert tree.tokens_BN[row].tolist() == draft.tokens
            assert tree.parents_BN[row].tolist() == draft.parents
            assert tree.depths_BN[row].tolist() == draft.depths()
            assert [bits % 2**64 for bits in tree.tail_bits_BT[row].tolist()] == bits_of(draft.tail_mask())


def test_of_nodes_with_equal_scores_the_first_are_kept():
    """All tokens are equally likely; the eager executor's stable sort keeps the same nodes."""
    seen = []

    def step(frontier):
        seen.append(frontier)
        return torch.zeros(1, 2, 4), frontier.h_BWD

    logits = torch.tensor([[0.0, 0.0, -50.0, -50.0]])
    tree = grow_tree(logits, torch.zeros(1, 3), step, TreeShape(2, 5), 3)
    assert tree.parents_BN.tolist() == [[-1, -1, 0, 0, 1]]
    assert [frontier.tail for frontier in seen] == [2, 4]
    assert [frontier.tail_bits_BW.tolist() for frontier in seen] == [[[0b1, 0b10]], [[0b101, 0b1001]]]


def random_tree(count: int, depth: int, alphabet: int) -> Draft:
    """A random tree with its nodes ordered by level; siblings may have the same token."""
    levels = sorted([1, *(random.randint(1, depth) for _ in range(count - 1))])
    while any(level > before + 1 for before, level in pairwise(levels)):
        levels = sorted([1, *(random.randint(1, depth) for _ in range(count - 1))])
    parents = [
        -1 if level == 1 else random.choice([i for i, other in enumerate(levels) if other == level - 1]) for level in levels
    ]
    return Draft([random.randrange(alphabet) for _ in levels], parents, [1.0] * count)


def tensors_of(drafts: list[Draft], depth: int) -> TreeDraft:
    parents = torch.tensor([draft.parents for draft in drafts])
    depths = torch.tensor([draft.depths() for draft in drafts])
    return TreeDraft(torch.tensor([draft.tokens for draft in drafts]), parents, depths, tail_bits(parents, depth))


@pytest.mark.parametrize(("count", "depth"), [(63, 7), (12, 4), (5, 1), (1, 3)])
def test_accepted_paths_equal_the_eager_executors(count, depth):
    num_rows, alphabet = 40, 3
    drafts = [random_tree(count, depth, alphabet) for _ in range(num_rows)]
    tree = tensors_of(drafts, depth)
    chosen = torch.randint(0, alphabet, (num_rows, 1 + count))
    active = (torch.arange(num_rows) % 7 != 6).int()
    path = accept_tree(chosen, tree, depth, active)
    chain, chain_drafts = collapse(chosen, tree, path)
    lengths = set()
    for row, draft in enumerate(drafts):
        assert [bits % 2**64 for bits in tree.tail_bits_BT[row].tolist()] == bits_of(draft.tail_mask())
        verified = verify(chosen[row].tolist(), draft)
        accepted = verified.accepted if active[row] else []
        rows = [0, *(node + 1 for node in accepted)]
        assert path.rows_BT[row].tolist() == rows + [rows[-1]] * (depth + 1 - len(rows))
        assert int(path.counts_B[row]) == len(accepted)
        assert chain_drafts[row].tolist() == [draft.tokens[node] for node in accepted] + [-1] * (depth - len(accepted))
        if active[row]:
            assert int(chain[row, len(accepted)]) == verified.next_token
            lengths.add(len(accepted))
    assert len(lengths) > 1, "the test must cover paths of several lengths"


def test_a_collapsed_path_is_accepted_like_a_chain():
    draft = Draft([10, 11, 20, 21, 30], [-1, -1, 0, 1, 2], [1.0] * 5)
    tree = tensors_of([draft] * 3, 3)
    chosen = torch.tensor([[11, 0, 21, 0, 50, 0], [10, 20, 0, 30, 0, 60], [10, 20, 0, 30, 0, 60]])
    state = RowState(
        active=torch.tensor([1, 1, 0], dtype=torch.int32),
        token=torch.tensor([1, 2, 3]),
        length=torch.tensor([5, 6, 7], dtype=torch.int32),
        answered=torch.zeros(3, dtype=torch.int32),
        report=torch.zeros(3, 6, dtype=torch.int32),
        limit=torch.full((3,), 8, dtype=torch.int32),
        min_answer=torch.zeros(3, dtype=torch.int32),
        depth_limit=torch.full((3,), 9, dtype=torch.int32),
        stop_bits=torch.tensor([[0] * 4, [1 << 20, 0, 0, 0], [0] * 4], dtype=torch.int32),
        tokens=torch.zeros(3, 12, dtype=torch.int32),
    )
    path = accept_tree(chosen, tree, 3, state.active)
    chain, drafts = collapse(chosen, tree, path)
    accepted = accept(state, PartialArgmax(torch.zeros(12, 1), chain.view(12, 1).int()), drafts, 4, 100)
    assert state.tokens[0, 5:9].tolist() == [11, 21, 50, 0]
    assert state.length.tolist() == [8, 8, 7]
    assert accepted.counts_B.tolist() == [3, 0, 0]  # the second row ended at its stop token
    assert state.report[:, 0].tolist() == [3, 2, 0]
    assert path.counts_B.tolist() == [2, 3, 0]


def test_inactive_rows_have_no_slots_and_no_keys():
    tables = torch.tensor([[4, 2], [0, 0], [1, 3]])
    bits = torch.tensor([[0b01, 0b11]] * 3)
    meta = tree_attention(torch.tensor([3, 99, -1]), torch.tensor([1, 0, 0]), torch.tensor([0, 1]), bits, 2, tables, PAGE)
    assert meta.slots_N.tolist() == [19, 8, -1, -1, -1, -1]
    assert meta.positions_N.tolist() == [3, 4, 0, 0, 0, 0]
    assert meta.lengths_B.tolist() == [5, 0, 0]


def test_trees_too_wide_for_the_mask_are_refused():
    check_shape(TreeShape(16, 63), 5)
    with pytest.raises(UserError, match="width 16 and depth 6"):
        check_shape(TreeShape(16, 63), 6)


def test_no_operation_depends_on_tensor_values():
    """On meta tensors any operation that reads a value fails, or has a shape that depends on one. CUDA graphs require this."""
    with torch.device("meta"):
        batch, width, depth, size = 3, 4, 3, 8
        shape, starts, active = (
            TreeShape(width, 10),
            torch.empty(batch, dtype=torch.int32),
            torch.empty(batch, dtype=torch.int32),
        )
        pages = torch.empty(batch, 5, dtype=torch.int32)

        def step(frontier):
            where = (frontier.offset, frontier.tail_bits_BW, frontier.tail, pages, PAGE)
            assert tree_attention(starts, active, *where).slots_N.shape == (batch * width,)
            return torch.empty(batch, width, 50), frontier.h_BWD

        ids = torch.empty(50, dtype=torch.int64)
        tree = grow_tree(torch.empty(batch, 50), torch.empty(batch, size), step, shape, depth, target_ids_V=ids)
        assert row_depths(tree).shape == (batch, 11)
        assert verify_attention(tree, starts, active, pages, PAGE).positions_N.shape == (batch * 11,)
        chosen = torch.empty(batch, 11, dtype=torch.int64)
        path = accept_tree(chosen, tree, depth, active)
        assert [x.shape for x in collapse(chosen, tree, path)] == [(batch, depth + 1), (batch, depth)]
        assert along_path(torch.empty(batch * 11, size), path).shape == (batch * (depth + 1), size)
        texts = torch.empty(batch, 100, dtype=torch.int32)
        assert ngram_drafts_reference(texts, starts, active, batch, depth).shape == (batch, depth)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_captured_graph_equals_eager_calls():
    batch, width, depth, vocab, size = 3, 4, 3, 50, 8
    shape = TreeShape(width, 10)
    count = shape.num_nodes(depth, vocab)
    generator = torch.Generator("cuda").manual_seed(1)
    logits, h, head = (
        torch.randn(*x, device="cuda", generator=generator) for x in ((batch, vocab), (batch, size), (size, vocab))
    )
    chosen = torch.randint(0, vocab, (batch, 1 + count), device="cuda", generator=generator)
    starts = torch.tensor([5, 9, 2], dtype=torch.int32, device="cuda")
    active = torch.tensor([1, 0, 1], dtype=torch.int32, device="cuda")
    pages = torch.randperm(batch * 8, device="cuda", generator=generator).view(batch, 8).int()
    keys, values = (torch.randn(2, 2, batch * 8 * PAGE, 8, device="cuda", generator=generator) for _ in range(2))
    texts = torch.randint(0, 3, (batch, 60), dtype=torch.int32, device="cuda", generator=generator)

    def step(frontier):
        h = torch.tanh(frontier.h_BWD + frontier.tokens_BW[..., None] / vocab)
        return h @ head, h

    def run():
        tree = grow_tree(logits, h, step, shape, depth)
        meta = verify_attention(tree, starts, active, pages, PAGE)
        path = accept_tree(torch.where(chosen % 2 == 0, tree.tokens_BN[:, :1], chosen), tree, depth, active)
        chain, drafts = collapse(chosen, tree, path)
        moved = [keys.clone(), values.clone()]
        compact_path(*moved, pages, PAGE, starts, path.rows_BT, path.counts_B)
        return [
            *tree,
            meta.lengths_B,
            meta.positions_N,
            meta.slots_N,
            meta.tail_bits_BT,
            *path,
            chain,
            drafts,
            *moved,
            ngram_drafts(texts, starts, active, batch, depth),
        ]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        logits.normal_(generator=generator)
        chosen.random_(0, vocab, generator=generator)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))
