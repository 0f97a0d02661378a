"""The CUDA-graph executor: decoding cycles are captured graphs, and their output is read one submission late.

    host     | submit prefill A | submit cycle 1, collect A's first token | submit cycle 2 and prefill B, collect 1 | …
    device                 |  prefill A  |     cycle 1     |     cycle 2     |  prefill B  |     cycle 3   …

A request has a row of the batch while it runs. Prefills are enqueued behind a cycle, which keeps the device busy while the
host prepares them. If the host needs longer to process the output than the device to run a cycle, several cycles are launched
together (`LaunchAhead`). Without `capture` the same functions run eagerly, on any device: tests do so on a CPU.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fledge.engine.config import EngineConfig
from fledge.engine.executors.base import Chunk, Executor, Output, Plan
from fledge.engine.executors.batch_state import ADJUSTED, GREEDY, SAMPLED, RowInit
from fledge.engine.executors.device_batch import CHOICE, LOGPROBS, VERIFY, DeviceBatch
from fledge.engine.executors.graphs import size_for
from fledge.engine.executors.hidden_states import DeviceStates
from fledge.engine.executors.output_reader import MAX_CYCLES, LaunchAhead, OutputReader
from fledge.engine.executors.recording import UsualGraphs
from fledge.engine.kv_pool import PageKeys, PagePool
from fledge.engine.request import Request
from fledge.errors import RequestError, UserError
from fledge.kernels.adjustments import RowOptions
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.bits import num_words
from fledge.models.decoder import Decoder
from fledge.sampling import SamplingParams
from fledge.speculation.controller import SpeculationController
from fledge.speculation.costs import GraphCosts
from fledge.speculation.distribution import LEAST_TOP_P
from fledge.speculation.methods.base import CapturedMethod, Drafter

log = logging.getLogger("fledge.engine")

# Cached tokens of a prompt that are always worth reusing; with fewer, half of the prompt must be cached.
LEAST_REUSE = 1024
# The most cycles that are launched together while a request waits for prefill.
MAX_CYCLES_BEFORE_PREFILL = 2


class _Halted(NamedTuple):
    """An ADJUSTED cycle that needs grammar masks before its CHOICE stage."""

    rows: dict[int, Request]
    shape: tuple[int, ...]
    drafted: dict[int, Request]
    masked: dict[int, Request]
    drafts: torch.Tensor | None  # [size, depth], on the host once the event has passed
    event: torch.cuda.Event | None


class CudaGraphExecutor(Executor):
    is_ragged = False
    costs: GraphCosts

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        pool: PagePool,
        cache: PagedKV,
        controller: SpeculationController,
        drafter: Drafter | None = None,
        *,
        capture: bool = True,
    ) -> None:
        super().__init__(decoder, config, pool, cache, controller, drafter)
        self.lookahead = 0 if drafter is None else drafter.lookahead
        limit = controller.limit
        self.batch = DeviceBatch(decoder, config, cache, max_depth=limit, lookahead=self.lookahead, capture=capture)
        self.method = self._method(drafter)
        if self.method is not None:
            self.batch.use(self.method)
        self.reader = OutputReader(self.batch)
        self.launch_ahead = LaunchAhead()
        self.costs = GraphCosts(self.batch.graphs.seconds)
        controller.use_costs(self.costs)
        self.row_of: dict[Request, int] = {}
        self.free_rows = list(range(config.max_num_seqs))  # a heap: low rows first keeps the batch dense
        self.prefilling: dict[Request, RowInit] = {}  # requests whose text is prefilled in chunks
        self.num_in_flight = 0  # launches of the last submission: not collected while the device works on them
        self.usual_graphs: UsualGraphs | None = None
        self.halted: _Halted | None = None  # a cycle that waits for grammar masks
        self.deferred: list[Chunk] = []  # prefills that wait for the halted cycle
        # Sampling properties of requests with a row. Cached: those of `SamplingParams` are too slow for 256 rows every cycle.
        self.mode_of: dict[Request, int] = {}
        self.masked: set[Request] = set()
        self.with_logprobs: set[Request] = set()
        self.undrafted: set[Request] = set()  # requests with options that the method cannot apply along its drafts
        # Called before cycles that draft are launched, with the rows that are drafted for and the depth.
        self.before_drafts: Callable[[dict[int, Request], int], None] | None = None

    def check(self, params: SamplingParams) -> None:
        if len(params.token_masks) < len(params.logits_processors):
            raise RequestError(
                "logits_processors are Python functions and run on the device cpu only; "
                "on a GPU use logit_bias, bad_words or structured output"
            )

    def _method(self, drafter: Drafter | None) -> CapturedMethod | None:
        if drafter is None:
            return None
        method = drafter.captured(self.batch.state, self.batch.max_positions, self.controller.limit)
        if method is None:
            raise UserError(f"{drafter.description}: this drafting method does not run in CUDA graphs; use --device cpu")
        return method

    @property
    def max_unread_tokens(self) -> int:
        return self.reader.max_unread_tokens

    # A step

    def prepare(self, decoding: Sequence[Request], *, expects_requests: bool) -> None:
        """Compacts the rows, and sets the batch shape that `costs` refer to."""
        if not decoding:
            return
        if not expects_requests:
            self._compact(decoding)
        self.costs.batch = self._shape(decoding)

    def submit(self, plan: Plan) -> None:
        self._add_pages(plan)
        self.num_in_flight = self._launch(plan)
        if self.halted is None:
            self.num_in_flight += self._prefill(plan.prefills)
        else:
            # A row prefilled now would be active when the halted cycle runs CHOICE, though that cycle did not verify it.
            self.deferred = plan.prefills

    def collect(self) -> list[Output]:
        return self.reader.read(but_last=self.num_in_flight, record=self.costs.record)

    def resume(self) -> None:
        """Fills the grammar masks of a cycle that waits for them, and enqueues the rest of it."""
        if (halted := self.halted) is None:
            return
        self.halted = None
        drafts = None
        if halted.drafts is not None:
            if halted.event is not None:
                halted.event.synchronize()
            drafts = halted.drafts.tolist()
        masks = {}
        for row, request in halted.masked.items():
            if request.finished:
                continue
            found = self._masks(request, drafts[row] if drafts is not None and request not in self.undrafted else [])
            if found is not None:
                masks[row] = found
        if masks:
            self.batch.state.set_masks(masks)
        self._choose(halted.rows, halted.shape, halted.drafted)
        self._prefill(self.deferred)
        self.deferred = []

    def _masks(self, request: Request, drafts: list[int]) -> np.ndarray | None:
        """Which tokens the request's grammar allows after its answer and after each drafted token; int32 [T, W].

        None: the grammar failed. The request ends when its output is collected; others continue.
        """
        answer, width = request.answer, num_words(self.decoder.config.vocab_size)
        masks = torch.full((len(drafts) + 1, width), -1, dtype=torch.int32)
        try:
            for position in range(len(drafts) + 1):
                for mask in request.params.token_masks:
                    mask.fill(answer + drafts[:position], masks[position])
        except Exception as failure:
            self.reader.failures[request] = failure
            return None
        return masks.numpy()

    def _shape(self, decoding: Sequence[Request]) -> tuple[int, ...]:
        """The batch size, sampling mode and, for short contexts, KV length bucket of a cycle for these requests."""
        size = size_for(self.batch.sizes, max(self.row_of[request] for request in decoding) + 1)
        mode = self.batch.recorded_mode(max(map(self.mode_of.__getitem__, decoding)))
        longest = max(len(request.tokens) for request in decoding)
        most_keys = longest + self.reader.max_unread_tokens + MAX_CYCLES * (self.controller.limit + 1) + self.lookahead
        return (size, mode, *self.batch.kv_bucket(most_keys))

    def _launch(self, plan: Plan) -> int:
        """Enqueues the plan's cycles; returns how many."""
        if not plan.decodes:
            return 0
        if self.reader.has_unread:
            self.launch_ahead.record(device_was_idle=self.reader.all_done)
        rows = {self.row_of[request]: request for request in plan.decodes}
        followed = {row: request for row, request in rows.items() if request.speculate and not request.drafter_stale}
        drafted = {row: request for row, request in followed.items() if request not in self.undrafted}
        size, mode, *bucket = self._shape(list(plan.decodes))
        depth = plan.depth if drafted else 0
        if followed and not depth and self.method is not None and not self.method.follows_plain_cycles:
            # A plain cycle keeps no hidden states: the drafter cannot catch up with these rows without recomputation.
            self.batch.state.rows.depth_limit.index_fill_(0, self.batch.state.upload(np.array(list(followed))), 0)
            for request in followed.values():
                request.drafter_stale = True
        if not depth and self.states is not None:
            self.states.drop(plan.decodes, self.row_of)
        if depth and self.before_drafts is not None:
            self.before_drafts(drafted, depth)
        shape = (size, depth, mode, *bucket)
        if shape not in self.batch.graphs.graphs and self.batch.graphs.capture:
            self.batch.graphs.record_late(shape, self.batch.record)
        masked = {row: request for row, request in rows.items() if request in self.masked} if self.masked else {}
        cycles = 1 if masked else plan.cycles
        drafted_rows = drafted if depth else {}
        for _ in range(cycles):
            self.batch.graphs.run(*shape)
            if mode < ADJUSTED:
                self.reader.enqueue_copy(rows, depth, shape, drafted_rows.keys())
                continue
            if masked:  # the host fills the masks while the target runs
                drafts, event = None, None
                if depth and not self.undrafted.issuperset(masked.values()):
                    drafts, event = self.batch.download(self.batch.state.drafts[:size, :depth])
                self.halted = _Halted(rows, shape, drafted_rows, masked, drafts, event)
            self.batch.graphs.run(size, depth, VERIFY, *bucket)
            if not masked:
                self._choose(rows, shape, drafted_rows)
        return 0 if masked else cycles

    def _choose(self, rows: dict[int, Request], shape: tuple[int, ...], drafted: dict[int, Request]) -> None:
        """Enqueues the CHOICE stage of an ADJUSTED cycle, and LOGPROBS if a row asked for them."""
        size, depth, _, *bucket = shape
        self.batch.graphs.run(size, depth, CHOICE, *bucket)
        logprobs = None
        if not self.with_logprobs.isdisjoint(rows.values()):
            self.batch.graphs.run(size, depth, LOGPROBS, *bucket)
            logprobs = self.batch.logprobs[size, depth, *bucket]
        self.reader.enqueue_copy(rows, depth, shape, drafted.keys(), logprobs)

    def _add_pages(self, plan: Plan) -> None:
        rows: list[int] = []
        places: list[int] = []
        pages: list[int] = []
        for request, before in plan.grown:
            if (row := self.row_of.get(request)) is not None:
                grown = range(before, len(request.pages))
                rows, places, pages = rows + [row] * len(grown), places + list(grown), pages + request.pages[before:]
        if rows:
            self.batch.state.add_pages(*self.batch.state.upload(np.array([rows, places, pages])))

    def _prefill(self, chunks: Sequence[Chunk]) -> int:
        """Enqueues prefills; returns how many of the passes emit first tokens."""
        whole: dict[Request, RowInit] = {}
        num_passes = 0
        for chunk in chunks:
            request = chunk.request
            if request not in self.row_of:
                self.row_of[request] = heapq.heappop(self.free_rows)
            if chunk.completes and request not in self.prefilling:
                whole[request] = self._row_init(request, chunk.start)
            elif request not in self.prefilling:
                self.prefilling[request] = self._row_init(request, chunk.start)
        if whole:
            self.batch.prefill(list(whole.values()))
            self._prefilled({init.row: request for request, init in whole.items()})
            num_passes += 1
        for chunk in chunks:
            if (init := self.prefilling.get(chunk.request)) is not None:
                self.batch.prefill_chunk(init, chunk.start)
                if chunk.completes:
                    del self.prefilling[chunk.request]
                    self._prefilled({init.row: chunk.request})
                    num_passes += 1
                else:
                    self.reader.mark()
        return num_passes

    def _prefilled(self, rows: dict[int, Request]) -> None:
        """Called when prompts are completely prefilled: shares their pages and enqueues the copy of the first tokens."""
        for request in rows.values():
            self.pool.share(request.pages, request.page_keys, request.prefill_end)
        wanted = not self.with_logprobs.isdisjoint(rows.values())
        self.reader.enqueue_copy(rows, logprobs=self.batch.logprobs[()] if wanted else None)

    def _row_init(self, request: Request, num_cached: int) -> RowInit:
        params, row = request.params, self.row_of[request]
        if self.method is not None and not self.method.adjusts_drafts and params.adjusts_logits:
            self.undrafted.add(request)
        if self.states is not None:
            self.states.begin(request, row, num_cached)
        options = None
        if params.has_row_options:
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            options = RowOptions(row, request.prompt, request.answer, *penalties, params.logit_bias or {}, params.bad_word_ids)
        masks = self._masks(request, []) if params.token_masks else None
        init = RowInit(
            row=row,
            text=list(request.tokens),
            pages=request.pages,
            limit=min(params.max_tokens, self.config.max_model_len - len(request.prompt)),
            seed=request.seed,
            temperature=0.0 if params.greedy else params.temperature,
            top_p=max(params.top_p, LEAST_TOP_P),
            stop_ids=sorted(request.end_token_ids),
            depth_limit=self.controller.limit if request.speculate and request not in self.undrafted else 0,
            num_cached=num_cached,
            num_answered=request.num_answer,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            min_answer=params.min_tokens,
            options=options,
            mask=None if masks is None else masks[0],
            wants_logprobs=params.logprobs is not None,
        )
        self.mode_of[request] = init.mode
        if init.mask is not None:
            self.masked.add(request)
        if init.wants_logprobs:
            self.with_logprobs.add(request)
        return init

    # Rows

    def release(self, requests: Sequence[Request]) -> None:
        """Enqueues the deactivation of rows: it runs after the cycles in flight and before any later one, so their pages are
        free at once."""
        leaving = [request for request in requests if request in self.row_of]
        if not leaving:
            return
        self.batch.state.stop(self.batch.state.upload(np.array([self.row_of[request] for request in leaving])))
        if self.states is not None:
            self.states.detach([self.row_of[request] for request in leaving])
            self.states.drop([request for request in leaving if request.finish_reason not in ("stop", "length")])
        for request in leaving:
            is_prefilled = request.num_answer and request not in self.prefilling
            if is_prefilled and (not self._has_own_cache or (request.speculate and not request.drafter_stale)):
                # Without the tokens of the last cycle: if it ended the answer, the drafter was not synced with it.
                self.pool.share(request.pages, request.page_keys, len(request.tokens) - 1 - self.lookahead)
            self.prefilling.pop(request, None)
            self.mode_of.pop(request, None)
            self.masked.discard(request)
            self.with_logprobs.discard(request)
            self.undrafted.discard(request)
            heapq.heappush(self.free_rows, self.row_of.pop(request))

    def _compact(self, decoding: Sequence[Request]) -> None:
        """Moves the highest rows into free lower ones if all rows then fit a smaller graph."""
        size = size_for(self.batch.sizes, len(self.row_of))
        if self.prefilling or size == size_for(self.batch.sizes, max(self.row_of.values()) + 1):
            return
        moving = {request: row for request, row in self.row_of.items() if row >= size}
        targets = [heapq.heappop(self.free_rows) for _ in moving]
        upload = self.batch.state.upload
        self.batch.state.move(upload(np.array(list(moving.values()))), upload(np.array(targets)))
        for (request, source), target in zip(moving.items(), targets, strict=True):
            self.row_of[request] = target
            heapq.heappush(self.free_rows, source)

    # Policy

    def chunk_tokens(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> int:
        """Prompts up to a chunk's size are prefilled whole, several per pass. Longer ones get one chunk per step."""
        if remaining <= self.batch.chunk_tokens:
            return remaining
        return 0 if any(not chunk.completes for chunk in chunks) else self.batch.chunk_tokens

    def admits(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> bool:
        return remaining > self.batch.chunk_tokens or remaining <= budget or not chunks

    def prefill_budget(self, num_decode_rows: int) -> int:
        return self.config.max_batched_tokens

    def least_reuse(self, num_tokens: int) -> int:
        """Attention over cached keys is slower than over a prompt's own and takes a separate pass: reuse must save half of the
        prompt or `LEAST_REUSE` tokens."""
        return min(-(-num_tokens // 2), self.batch.chunk_tokens, LEAST_REUSE)

    def page_keys(self, request: Request, num_requests: int) -> PageKeys:
        return PageKeys(request.tokens, self.pool.page_size, drafted=self._has_own_cache)

    @property
    def _has_own_cache(self) -> bool:
        """Whether the drafter has a KV cache of its own, addressed by the target's pages."""
        return self.method is not None and self.method.cache is not None

    @property
    def prefill_seconds(self) -> float:
        return self.batch.prefills.least_seconds

    def recompute_seconds(self, num_tokens: int) -> float | None:
        return self.batch.prefills.seconds_for(num_tokens)

    def cycles_ahead(self, *, expects_requests: bool) -> int:
        cycles = self.launch_ahead.cycles
        return min(cycles, MAX_CYCLES_BEFORE_PREFILL) if expects_requests else cycles

    def warm_up(self) -> list[str]:
        if not self.batch.graphs.capture:
            return []
        self.usual_graphs = UsualGraphs(self.batch, [0, *self.controller.acceptance.depths])
        return self.usual_graphs.warm_up()

    def compile_kernels(self) -> None:
        """Compiles the cycles' kernels for every batch size on all cores; compiled one by one on first use they take over a
        minute."""
        if self.batch.graphs.capture:
            UsualGraphs(self.batch, [0, *self.controller.acceptance.depths]).compile_cycles((SAMPLED, GREEDY))

    def idle(self) -> bool:
        return self.usual_graphs is not None and self.usual_graphs.idle()

    @property
    def states(self) -> DeviceStates | None:
        return self.batch.states

    def collect_states(self, *, limit: int) -> None:
        if not limit:
            if self.states is not None:
                self.states.stop()
            return
        if self.method is None or not self.method.taps:
            return
        num_rows, num_layers = len(self.batch.state.seed), len(self.method.taps) + 1
        size, dtype = self.decoder.config.hidden_size, self.decoder.dtype
        self.batch.keep_states(DeviceStates(limit, num_rows, num_layers, size, dtype, self.batch.device))

    def interrupted(self) -> None:
        self.reader.mark()
        self.launch_ahead.skips_next = True

    def check_integrity(self, running: Sequence[Request]) -> None:
        assert self.row_of.keys() <= set(running), "a request that left has a row"
        rows = sorted([*self.row_of.values(), *self.free_rows])
        assert rows == list(range(self.config.max_num_seqs)), "a row has two owners or none"
        assert self.prefilling.keys() <= self.row_of.keys(), "a prompt is prefilled without a row"
