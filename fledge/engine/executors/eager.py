"""The eager executor: each step runs when it is submitted. Used on CPU; tests compare the captured executor with it.

    submit(plan)    sync and draft  →  one target pass over pending tokens, drafts and prefill chunks  →  accept

One pass holds decoding, drafting and prefilling requests, each with as many rows as it needs. The drafter processes the hidden
states of a target pass at the beginning of the next step, when it is known which requests continue and at which depth.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fledge.engine.config import EngineConfig
from fledge.engine.executors.base import Chunk, Executor, Output, Plan, not_numbers
from fledge.engine.executors.hidden_states import HostStates
from fledge.engine.executors.sync_queue import SyncQueue
from fledge.engine.kv_pool import PageKeys, PagePool
from fledge.engine.request import Request, TokenLogprob
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV, SequenceLayout, paired
from fledge.kernels.native import best_of
from fledge.models.decoder import Decoder
from fledge.ops.cpu_ops import eager_ops
from fledge.speculation.controller import SpeculationController
from fledge.speculation.costs import RowCosts
from fledge.speculation.depth import TreeShape
from fledge.speculation.distribution import adjust, draw
from fledge.speculation.methods.base import AcceptedSpan, Drafter
from fledge.speculation.verification import Draft, LazyChoices, Verification, VerifiedPass, verify

log = logging.getLogger("fledge.engine")


@dataclass
class Rows:
    """One request's rows in a pass: `num_tokens` of its text from `start`, then its draft."""

    request: Request
    start: int
    num_tokens: int
    draft: Draft
    offered: int = 0  # the depth that was planned
    completes: bool = True  # the pass reaches the end of the text, so that a new token follows

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft)

    def tokens(self) -> list[int]:
        return self.request.tokens[self.start : self.start + self.num_tokens] + self.draft.tokens


@dataclass
class TargetPass:
    """The outputs of a target pass over a batch."""

    logits: Tensor  # [rows that need them, V]: the last token of each completed text and its draft
    logits_start: list[int | None]  # per item: its first row in `logits`; None: its prompt is not complete
    rows_start: list[int]  # per item: its first row in the auxiliary hidden states
    aux_hidden_states: Sequence[Tensor]
    x_ND: Tensor  # the residual stream before the final norm


class EagerExecutor(Executor):
    is_ragged = True
    costs: RowCosts
    states: HostStates | None = None  # hidden states kept for learning

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        pool: PagePool,
        cache: PagedKV,
        controller: SpeculationController,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(decoder, config, pool, cache, controller, drafter)
        self.clock = clock
        self.device = cache.keys.device
        self.lookahead = drafter.lookahead if drafter is not None else 1
        self.taps = drafter.taps if drafter is not None else ()
        num_positions = config.max_model_len + self.lookahead
        self.ops = eager_ops(decoder, cache, deterministic=config.deterministic, num_positions=num_positions)
        tree = getattr(drafter, "tree", None)
        self.costs = RowCosts(controller.acceptance, tree.num_nodes if isinstance(tree, TreeShape) else None)
        controller.use_costs(self.costs)
        self.queue = SyncQueue() if controller.adaptive and self.taps else None
        if self.queue is not None:
            controller.pending_tokens = self.queue.num_tokens
        self.spans: list[AcceptedSpan] = []  # accepted tokens of the last pass, which the drafter has not processed,
        self.aux_hidden_states: Sequence[Tensor] = []  # and the hidden states of that pass
        self.outputs: list[Output] = []

    # A step

    def submit(self, plan: Plan) -> None:
        if plan.is_empty:
            return
        began = self.clock()
        drafts, num_synced = self._draft(plan)
        drafted_at = self.clock()
        batch = [
            Rows(request, len(request.tokens) - 1, 1, drafts.get(request) or Draft(), depth)
            for request, depth in plan.decodes.items()
        ]
        batch += [Rows(chunk.request, chunk.start, chunk.num_tokens, Draft(), 0, chunk.completes) for chunk in plan.prefills]
        done = self.run_target(batch)
        self.outputs = self._accept(batch, done)
        self._record_costs(plan, batch, num_synced, drafted_at - began, self.clock() - drafted_at)

    def collect(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def _draft(self, plan: Plan) -> tuple[dict[Request, Draft], int]:
        """Returns drafts for the plan's requests, and how many tokens the drafter processed first."""
        if self.drafter is None or not self.spans:
            return {}, 0
        spans = self.spans
        states: Sequence[Tensor] = self.aux_hidden_states
        self.spans, self.aux_hidden_states = [], []
        longest = self.config.max_model_len
        for span in spans:
            depth = plan.decodes.get(span.request, 0)
            span.max_draft_tokens = max(0, min(depth, longest - len(span.request.tokens)))
        due = spans
        if self.queue is not None:
            due, states = self.queue.due(spans, states, self._may_postpone)
        drafts = self._run_drafter(due, states)
        return dict(zip((span.request for span in due), drafts, strict=False)), sum(len(span.rows) for span in due)

    def _run_drafter(self, due: Sequence[AcceptedSpan], states: Sequence[Tensor]) -> list[Draft]:
        """Syncs the drafter and drafts; shares the pages it has processed with other requests."""
        if not due or self.drafter is None:
            return []
        try:
            drafts = self.drafter.draft(due, states)
        except Exception:  # decoding continues without drafts, only slower
            log.exception("the drafter failed; decoding continues without speculation")
            self._stop_drafting()
            return []
        if self.taps:
            for span in due:
                self.publish(span.request, span.start + len(span.rows))
        return drafts

    def _stop_drafting(self) -> None:
        """Turns speculation off. New requests then look up pages by target-only keys and find no page stored for both."""
        self.drafter, self.taps, self.queue = None, (), None
        self.controller.stop()

    def _may_postpone(self, request: Request) -> bool:
        """Whether the drafter may process a prompt later. Not if others may reuse its pages: they need the drafter's KV."""
        is_private = request.page_keys is None or not request.page_keys.drafted
        return is_private and not self.controller.depth and self.costs.is_known

    def run_target(self, batch: Sequence[Rows]) -> TargetPass:
        """Runs the target over the texts and drafts of a batch."""
        tokens: list[int] = []
        positions: list[int] = []
        layouts: list[SequenceLayout] = []
        rows_start: list[int] = []
        logits_start: list[int | None] = []
        wanted: list[int] = []
        for item in batch:
            first, text_end = len(tokens), item.start + item.num_tokens
            rows_start.append(first)
            tokens.extend(item.tokens())
            positions.extend(range(item.start, text_end))
            positions.extend(text_end - 1 + depth for depth in item.draft.depths())
            mask = None if item.draft.is_chain else item.draft.tail_mask()
            layouts.append(SequenceLayout(item.request.pages, item.num_rows, text_end + len(item.draft), mask))
            logits_start.append(len(wanted) if item.completes else None)
            if item.completes:
                wanted.extend(range(first + item.num_tokens - 1, len(tokens)))
        tensors = paired(tokens, positions).to(self.device)
        meta = AttentionMetadata.from_layouts(layouts, tensors[1], self.cache.page_size, max(positions))
        logits, states, x = self.ops.target_pass(self.decoder, tensors[0], meta, self.taps, wanted)
        return TargetPass(logits, logits_start, rows_start, states, x)

    # Acceptance

    def _accept(self, batch: Sequence[Rows], done: TargetPass) -> list[Output]:
        """Verifies the drafts and returns each request's new tokens; keeps what the drafter must process in the next step."""
        outputs: list[Output] = []
        spans: list[AcceptedSpan] = []
        best: list[int] | None = None
        for index, item in enumerate(batch):
            request, first, first_row = item.request, done.logits_start[index], done.rows_start[index]
            rows = list(range(first_row, first_row + item.num_tokens))
            if first is not None:
                is_simple = request.params.greedy and not request.params.adjusts_logits
                if is_simple and best is None:
                    best = best_of(done.logits)[0]
                try:
                    choices = best[first : first + 1 + len(item.draft)] if is_simple and best is not None else None
                    verified = verify(choices or self._choices(request, item.draft, done.logits[first:]), item.draft)
                    outputs.append(self._output(item, verified, done.logits, first))
                except Exception as failure:  # a failing logits processor, or NaN logits: other requests continue
                    outputs.append(Output(request, [], [], [], failure=failure))
                    continue
                if not item.draft.is_chain:
                    self._keep_path(item, verified.accepted)
                rows += [first_row + item.num_tokens + node for node in verified.accepted]
            if self.states is not None and self.taps:
                self.states.add(request, item.start, rows, [*done.aux_hidden_states, done.x_ND])
            if self.drafter is not None and request.speculate:
                spans.append(AcceptedSpan(request, item.start, rows))
            if not self._is_drafted(request):
                self.publish(request, item.start + len(rows))
        self.spans, self.aux_hidden_states = spans, done.aux_hidden_states
        return outputs

    def _choices(self, request: Request, draft: Draft, logits: Tensor) -> LazyChoices:
        params, answer = request.params, request.answer
        stop_ids = sorted(request.end_token_ids)

        def choose(row: int, path: list[int]) -> int:
            adjusted = logits[row].float()
            if params.adjusts_logits:
                adjusted = adjust(adjusted, params, request.prompt, answer + path, stop_ids)
            return draw(adjusted, params, request.seed, len(answer) + len(path))

        return LazyChoices(choose, draft)

    def _output(self, item: Rows, verified: Verification, logits: Tensor, first: int) -> Output:
        draft, accepted = item.draft, verified.accepted
        tokens = [draft.tokens[node] for node in accepted] + [verified.next_token]
        if math.isnan(float(logits[first + 1 + accepted[-1] if accepted else first, verified.next_token])):
            raise not_numbers()
        depth, offered = draft.depth, max(item.offered, draft.depth) if len(draft) else 0
        # With sampling, acceptance exceeds the drafted probability, as drafter and target draw with the same noise.
        is_expected = self.drafter is not None and self.drafter.knows_confidence and item.request.params.greedy
        passes = [VerifiedPass(len(tokens), depth, len(draft), offered, draft.confidences if is_expected else ())]
        output = Output(item.request, tokens, [True] * len(accepted) + [False], passes)
        count = item.request.params.logprobs
        if count is not None:
            rows = logits[[first + 1 + node for node in (-1, *accepted)]].float().log_softmax(-1)
            output.logprobs = [_logprob(row, token, count) for row, token in zip(rows, tokens, strict=True)]
        return output

    def _keep_path(self, item: Rows, accepted: Sequence[int]) -> None:
        """Moves the KV entries of a tree's accepted nodes to the consecutive slots that a chain would have."""
        size, base, pages = self.cache.page_size, item.start + item.num_tokens, item.request.pages
        slots = [
            [pages[(base + offset) // size] * size + (base + offset) % size for offset in offsets]
            for offsets in (accepted, range(len(accepted)))
        ]
        if slots[0] != slots[1]:
            self.cache.move(*slots)

    # Prefix cache

    def page_keys(self, request: Request, num_requests: int) -> PageKeys:
        """Under load, when nothing will be drafted, target-only pages are used as well if they cover more of the text."""
        size, drafted = self.pool.page_size, self._is_drafted(request)
        keys = PageKeys(request.tokens, size, drafted=drafted)
        if drafted and self.queue is not None and self._expects_load(num_requests + 1):
            target_only = PageKeys(request.tokens, size, drafted=False)
            found, found_target_only = len(self.pool.find(keys)), len(self.pool.find(target_only))
            if found_target_only > found or not found:
                return target_only
        return keys

    def _expects_load(self, num_requests: int) -> bool:
        return num_requests > 1 and self.costs.is_known and not self.controller.pays_with(num_requests)

    def _is_drafted(self, request: Request) -> bool:
        """Whether the request's pages hold the drafter's KV too."""
        keys = request.page_keys
        return bool(self.taps) and request.speculate and (keys is None or keys.drafted)

    def publish(self, request: Request, num_tokens: int) -> None:
        """Lets other requests find the request's pages of the first `num_tokens` tokens."""
        self.pool.share(request.pages, request.page_keys, num_tokens)

    def release(self, requests: Sequence[Request]) -> None:
        self._sync_prompts(requests)
        for request in requests:
            if request.is_prefilled and request.num_answer and not self._is_drafted(request):
                self.publish(request, len(request.tokens) - 1)
            if self.queue is not None:
                self.queue.forget(request)
            if self.drafter is not None:
                self.drafter.forget(request)
        if requests:
            self.spans = [span for span in self.spans if span.request not in requests]

    def _sync_prompts(self, leaving: Sequence[Request]) -> None:
        """Syncs the drafter with the prompts of answers that ended with their first token: no later step would, and without the
        drafter's KV no other request could reuse their pages."""
        if not (self.taps and self.config.prefix_caching):
            return
        due = [
            span
            for span in self.spans
            if span.request in leaving
            and span.request.num_answer == 1
            and span.request.finish_reason in ("stop", "length")
            and self._is_drafted(span.request)
        ]
        if not due:
            return
        for span in due:
            span.max_draft_tokens = 0
        states: Sequence[Tensor] = self.aux_hidden_states
        if self.queue is not None:
            due, states = self.queue.due(due, states, lambda request: False)
        self._run_drafter(due, states)

    # Policy

    def chunk_tokens(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> int:
        return min(remaining, budget)

    def admits(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> bool:
        return budget > 0

    def prefill_budget(self, num_decode_rows: int) -> int:
        return self.config.max_batched_tokens - num_decode_rows

    def _record_costs(self, plan: Plan, batch: Sequence[Rows], num_synced: int, drafting: float, verifying: float) -> None:
        """Records what a step cost. Draft costs exclude steps that prefill, sync queued states or explore."""
        num_rows = sum(item.num_rows for item in batch)
        if plan.prefills:
            self.costs.prefill.record(num_rows, verifying)
            return
        self.costs.verify.record(num_rows, verifying)
        num_drafted, depth = sum(len(item.draft) > 0 for item in batch), self.controller.depth
        is_ordinary = self.controller.explorer is None and num_synced <= num_rows
        if num_drafted and is_ordinary and depth in self.costs.draft:
            self.costs.draft[depth].record(num_drafted, drafting)

    def collect_states(self, *, limit: int) -> None:
        self.states = HostStates(limit) if limit else None

    def check_integrity(self, running: Sequence[Request]) -> None:
        assert {span.request for span in self.spans} <= set(running), "hidden states are kept for a request that left"


def _logprob(row: Tensor, token: int, count: int) -> TokenLogprob:
    top = row.topk(count) if count else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else []
    return TokenLogprob(token, float(row[token]), pairs)
