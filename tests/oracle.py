"""Drafters that know the answer, to exercise acceptance at every depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fledge.engine.build import EngineConfig, Speculation, build_engine
from fledge.engine.engine import Engine
from fledge.models.decoder import Decoder
from fledge.sampling import SamplingParams
from fledge.speculation.depth import DepthPolicy
from fledge.speculation.drafting import Drafter, Settled
from fledge.speculation.verification import Draft

CPU = EngineConfig(device="cpu", dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_tokens=4096)


class OracleSpeculator:
    """Drafts the true continuation: all of it (a perfect drafter), or with a wrong token after `reach(length)` right ones.

    As a tree, each true token gets a wrong sibling before it. `inner` is a real drafter that runs along and is kept in sync.
    """

    lookahead = 16
    description = "oracle"

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        depth: int,
        *,
        tree: bool = False,
        reach: Callable[[int], int] | None = None,
        inner: Drafter | None = None,
    ) -> None:
        self.answers, self.depth, self.tree, self.reach, self.inner = answers, DepthPolicy(depth), tree, reach, inner
        self.taps = inner.taps if inner is not None else ()
        self.inner_drafts: list[tuple[list[int], Draft]] = []

    def forget(self, sequence) -> None:
        if self.inner is not None:
            self.inner.forget(sequence)

    def draft(self, settled: Sequence[Settled], taps: Sequence[Tensor]) -> list[Draft]:
        if self.inner is not None:
            for item, draft in zip(settled, self.inner.draft(settled, taps), strict=True):
                self.inner_drafts.append((list(item.sequence.tokens), draft))
        return [self.draft_one(item) if item.room else Draft() for item in settled]

    def draft_one(self, item: Settled) -> Draft:
        tokens = item.sequence.tokens
        whole = list(item.sequence.prompt) + self.answers[tuple(item.sequence.prompt)]
        coming = whole[len(tokens) : len(tokens) + min(self.depth.limit, item.room)]
        if self.reach is not None and (right := self.reach(len(tokens))) < len(coming):
            coming = [*coming[:right], (coming[right] + 1) % 128]
        if not self.tree:
            return Draft(coming, list(range(-1, len(coming) - 1)), [1.0] * len(coming))
        draft, parent = Draft(), -1
        for token in coming:
            for candidate in ((token + 7) % 128, token):
                draft.tokens.append(candidate)
                draft.parents.append(parent)
                draft.confidences.append(0.5)
            parent = len(draft) - 1
        return draft


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages
    return [request.answer for request in requests]


def engine_with(decoder: Decoder, drafter, config: EngineConfig = CPU) -> Engine:
    """An engine around a ready-made drafter object, or around what `Speculation` describes, drafting as deep as it says."""
    if isinstance(drafter, Speculation):
        return build_engine(decoder, drafter.as_asked(), config)
    return Engine(decoder, config.resolve(decoder.config), drafter=drafter)
