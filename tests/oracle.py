"""An oracle drafter that knows the answers, to exercise acceptance at every depth, and engines and batches for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fledge.engine.admission import OfflineRefill
from fledge.engine.build import Speculation, build_engine, paged_kv
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.engine.executors.eager import EagerExecutor
from fledge.engine.kv_pool import PagePool
from fledge.engine.offline import AnswerGenerator
from fledge.engine.request import Request
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.speculation.controller import SpeculationController
from fledge.speculation.depth import DepthPolicy
from fledge.speculation.methods.base import AcceptedSpan, Drafter
from fledge.speculation.methods.eagle import CapturedEagle
from fledge.speculation.verification import Draft

CPU = EngineConfig(device="cpu", dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_tokens=4096)


class OracleSpeculator:
    """Drafts the true continuation, or, with `reach`, `reach(length)` correct tokens and then a wrong one.

    `tree`: each correct token has a wrong sibling before it. `inner`: a real drafter that runs alongside and stays in sync.
    """

    lookahead = 16
    description = "oracle"
    knows_confidence = False

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

    def forget(self, request) -> None:
        if self.inner is not None:
            self.inner.forget(request)

    def draft(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> list[Draft]:
        if self.inner is not None:
            for item, draft in zip(spans, self.inner.draft(spans, taps), strict=True):
                self.inner_drafts.append((list(item.request.tokens), draft))
        return [self.draft_one(item) if item.max_draft_tokens else Draft() for item in spans]

    def draft_one(self, item: AcceptedSpan) -> Draft:
        tokens = item.request.tokens
        whole = list(item.request.prompt) + self.answers[tuple(item.request.prompt)]
        coming = whole[len(tokens) : len(tokens) + min(self.depth.limit, item.max_draft_tokens)]
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


def engine_with(decoder: Decoder, drafter, config: EngineConfig = CPU, **settings) -> Engine:
    """An engine with a fixed depth. `drafter`: a drafter object, or a `Speculation` to build one from."""
    if isinstance(drafter, Speculation):
        return build_engine(decoder, drafter.fixed_depth(), config)
    return eager_engine(decoder, drafter, SpeculationController(drafter.depth.limit), config, **settings)


def eager_engine(
    decoder: Decoder, drafter, controller: SpeculationController, config: EngineConfig = CPU, **settings
) -> Engine:
    config = config.resolve(decoder.config).with_cache(decoder.config)
    pool = PagePool(-(-config.kv_cache_tokens // config.page_size), config.page_size)
    model = decoder.config
    cache = paged_kv(config, pool, model.num_layers, model.num_kv_heads, model.head_dim)
    executor = EagerExecutor(decoder, config, pool, cache, controller, drafter, **settings)
    return Engine(config, executor, pool, controller, drafter=drafter)


def record_drafts(engine: Engine) -> list[tuple[Request, list[int], Draft]]:
    """Returns a list that collects every draft verified from now on: the request, its tokens at that time, the draft."""
    drafts: list[tuple[Request, list[int], Draft]] = []
    run_target = engine.executor.run_target

    def recorded(batch):
        drafts.extend((rows.request, list(rows.request.tokens), rows.draft) for rows in batch)
        return run_target(batch)

    engine.executor.run_target = recorded
    return drafts


def captured_answers(decoder: Decoder, config: EngineConfig, drafter=None, depth: int = 1, *, capture: bool) -> AnswerGenerator:
    """An offline generator on the captured executor; without `capture` its functions run eagerly."""
    speculation = Speculation(drafter, depth).fixed_depth()
    engine = build_engine(decoder, speculation, config, capture=None if capture else False, admission=OfflineRefill())
    return AnswerGenerator(engine)


def make_batch(
    decoder: Decoder, config: EngineConfig, drafter: EagleDrafter | None = None, *, capture: bool = False, max_depth: int = 16
) -> DeviceBatch:
    """A batch with its own KV caches that drafts chains with `drafter`."""
    lookahead = 0 if drafter is None else max_depth + 1
    tokens = max(config.kv_cache_tokens, config.max_model_len + lookahead)
    pool = PagePool(-(-tokens // config.page_size), config.page_size)
    model = decoder.config
    cache = paged_kv(config, pool, model.num_layers, model.num_kv_heads, model.head_dim)
    batch = DeviceBatch(decoder, config, cache, max_depth=max_depth, lookahead=lookahead, capture=capture)
    if drafter is not None:
        drafter.share(decoder.embed_tokens, decoder.lm_head)
        shape = drafter.config
        own = paged_kv(config, pool, shape.num_layers, shape.num_kv_heads, shape.head_dim)
        batch.use(CapturedEagle(drafter, own, batch.state, batch.max_positions))
    return batch


def pages_for(batch: DeviceBatch, length: int, limit: int) -> int:
    return -(-(length + limit + batch.lookahead) // batch.config.page_size)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The reference sampling distribution after temperature, min-p, top-k and top-p. Temperature must not be 0."""
    probs = torch.softmax(logits.float() / params.temperature, -1)
    keep = None
    if params.min_p > 0:
        keep = probs >= params.min_p * probs.amax(-1, keepdim=True)
    if 0 < params.top_k < probs.shape[-1]:
        kth = probs.topk(params.top_k, -1).values[..., -1:]
        keep = probs >= kth if keep is None else keep & (probs >= kth)
    if keep is not None:
        probs = probs * keep
        probs = probs / probs.sum(-1, keepdim=True)
    if params.top_p < 1:
        ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        cut = ordered.cumsum(-1) - ordered >= params.top_p  # the cumulative probability before each token
        cut[..., 0] = False  # always keep the most probable token: the smallest top_p values are 0 in fp32
        ordered = ordered.masked_fill(cut, 0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs
