"""The CUDA-graph executor: decoding cycles are captured graphs, and their output is read one submission late.

    host     | submit prefill A | submit cycle 1, collect A's first token | submit cycle 2 and prefill B, collect 1 | …
    device                 |  prefill A  |     cycle 1     |     cycle 2     |  prefill B  |     cycle 3   …

A request has a row of the batch while it runs. Prefills are enqueued behind a cycle, which keeps the device busy while the
host prepares them. Where the host takes longer over the output than the device over a cycle, several cycles are launched
together (`LaunchAhead`). Without `capture` the same functions run eagerly, on any device: tests do so on a CPU.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from fledge.engine.config import EngineConfig
from fledge.engine.executors.base import Chunk, Output, Plan
from fledge.engine.executors.chunked_prefill import MIDDLE
from fledge.engine.executors.device_batch import CUT, GREEDY, SAMPLED, DeviceBatch, Entry, how_chosen
from fledge.engine.executors.graphs import size_for
from fledge.engine.executors.launch_ahead import MAX_CYCLES, LaunchAhead
from fledge.engine.executors.output_reader import OutputReader
from fledge.engine.executors.prefill import LONGEST, OVER_CACHE, TOKENS
from fledge.engine.kv_pool import PageKeys, PagePool
from fledge.engine.request import Request
from fledge.kernels.attention.paged import PagedKV
from fledge.models.decoder import Decoder
from fledge.speculation.controller import SpeculationController
from fledge.speculation.costs import GraphCosts
from fledge.speculation.distribution import LEAST_TOP_P
from fledge.speculation.drafting import Drafter, EagleSpeculator

# Cycles that a waiting request waits for at most before it is prefilled.
MAX_CYCLES_BEFORE_PREFILL = 2
# Up to this many rows, cycles for contexts of any length are recorded ahead beside those for short ones.
FEW_LONG_ROWS = 4


class CudaGraphExecutor:
    is_ragged = False

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
        self.decoder, self.config, self.pool, self.cache = decoder, config, pool, cache
        self.controller, self.drafter = controller, drafter
        network, drafter_cache = None, None
        if isinstance(drafter, EagleSpeculator):
            network, drafter_cache = drafter.network, drafter.cache
        self.batch = DeviceBatch(
            decoder,
            config,
            drafter=network,
            capture=capture,
            cache=cache,
            drafter_cache=drafter_cache,
            max_depth=controller.limit,
        )
        self.lookahead = self.batch.lookahead
        self.reader = OutputReader(self.batch)
        self.launch_ahead = LaunchAhead()
        self.costs = GraphCosts(self.batch.graphs.seconds)
        controller.use_costs(self.costs)
        self.row_of: dict[Request, int] = {}
        self.free_rows = list(range(config.max_num_seqs))  # a heap: low rows first keeps the batch dense
        self.prefilling: dict[Request, Entry] = {}  # rows whose prompt is prefilled in chunks
        self.num_in_flight = 0  # launches of the last submission: not collected while the device works on them
        # Called with the rows that are drafted for and the depth, before cycles that draft are launched.
        self.before_drafts: Callable[[dict[int, Request], int], None] | None = None

    @property
    def max_unread_tokens(self) -> int:
        return self.reader.max_unread_tokens

    # A step

    def prepare(self, decoding: Sequence[Request], *, expects_requests: bool) -> None:
        """Compacts the rows, and sets the shape that costs are asked for."""
        if not decoding:
            return
        if not expects_requests:
            self._compact(decoding)
        self.costs.batch = self._shape(decoding)

    def submit(self, plan: Plan) -> None:
        self._add_pages(plan)
        self.num_in_flight = self._launch(plan) + self._prefill(plan)

    def collect(self) -> list[Output]:
        return self.reader.read(but_last=self.num_in_flight, record=self.costs.record)

    def resume(self) -> None:
        """Nothing is left to do: cycles are launched whole."""

    def _shape(self, decoding: Sequence[Request]) -> tuple[int, ...]:
        """Batch size, sampling mode and, where it is bounded, the KV length bucket of a cycle for these requests."""
        size = size_for(self.batch.sizes, max(self.row_of[request] for request in decoding) + 1)
        mode = max(mode_of(request) for request in decoding)
        longest = max(len(request.tokens) for request in decoding)
        most_keys = longest + self.reader.max_unread_tokens + MAX_CYCLES * (self.controller.limit + 1) + self.lookahead
        return (size, mode, *self.batch.reach_for(most_keys))

    def _launch(self, plan: Plan) -> int:
        """Enqueues the plan's cycles; returns how many."""
        if not plan.decodes:
            return 0
        if self.reader.has_unread:
            self.launch_ahead.record(device_was_idle=self.reader.all_done)
        rows = {self.row_of[request]: request for request in plan.decodes}
        drafted = {row: request for row, request in rows.items() if request.speculate and not request.drafter_stale}
        depth = plan.depth if drafted else 0
        if drafted and not depth and self.controller.limit:
            # A plain cycle keeps no hidden states: the drafter falls behind for good.
            self.batch.slots.state.depth_limit.index_fill_(0, self.batch.upload(np.array(list(drafted))), 0)
            for request in drafted.values():
                request.drafter_stale = True
        if depth and self.before_drafts is not None:
            self.before_drafts(drafted, depth)
        size, *others = self._shape(list(plan.decodes))
        shape = (size, depth, *others)
        for _ in range(plan.cycles):
            self.batch.graphs.run(*shape)
            self.reader.enqueue_copy(rows, depth, shape, drafted.keys() if depth else ())
        return plan.cycles

    def _add_pages(self, plan: Plan) -> None:
        rows, places, pages = [], [], []
        for request, before in plan.grown:
            if (row := self.row_of.get(request)) is not None:
                grown = range(before, len(request.pages))
                rows, places, pages = rows + [row] * len(grown), places + list(grown), pages + request.pages[before:]
        if rows:
            self.batch.slots.add_pages(*self.batch.upload(np.array([rows, places, pages])))

    def _prefill(self, plan: Plan) -> int:
        """Enqueues the plan's prefills; returns how many passes give first tokens."""
        whole: list[Entry] = []
        num_passes = 0
        for chunk in plan.prefills:
            request = chunk.request
            if request not in self.row_of:
                self.row_of[request] = heapq.heappop(self.free_rows)
            if chunk.completes and request not in self.prefilling:
                whole.append(self._entry(request, chunk.start))
            elif request not in self.prefilling:
                self.prefilling[request] = self._entry(request, chunk.start)
        # Whole prompts attend over themselves, which is faster; those with a cached prefix attend over the cache.
        for entries in ([one for one in whole if not one.cached], [one for one in whole if one.cached]):
            if entries:
                self.batch.read_prompts(entries)
        if whole:
            rows = {entry.row for entry in whole}
            self._prefilled({row: request for request, row in self.row_of.items() if row in rows})
            num_passes += 1
        for chunk in plan.prefills:
            if (entry := self.prefilling.get(chunk.request)) is not None:
                self.batch.read_piece(entry, chunk.start)
                if chunk.completes:
                    del self.prefilling[chunk.request]
                    self._prefilled({entry.row: chunk.request})
                    num_passes += 1
                else:
                    self.reader.mark()
        return num_passes

    def _prefilled(self, rows: dict[int, Request]) -> None:
        """Whole prompts are in the caches: others can use them, and the first tokens are on their way."""
        for request in rows.values():
            self.pool.share(request.pages, request.page_keys, request.prefill_end)
        self.reader.enqueue_copy(rows)

    def _entry(self, request: Request, num_cached: int) -> Entry:
        params = request.params
        return Entry(
            self.row_of[request],
            list(request.tokens),
            request.pages,
            min(params.max_tokens, self.config.max_model_len - len(request.prompt)),
            request.seed,
            0.0 if params.greedy else params.temperature,
            max(params.top_p, LEAST_TOP_P),
            sorted(request.end_token_ids),
            self.controller.limit if request.speculate else 0,
            num_cached,
            request.num_answer,
            max(params.top_k, 0),
            params.min_p,
        )

    # Rows

    def release(self, requests: Sequence[Request]) -> None:
        """Stops rows behind the cycles in flight and before any later one: their pages can be given away at once."""
        leaving = [request for request in requests if request in self.row_of]
        if not leaving:
            return
        self.batch.slots.stop(self.batch.upload(np.array([self.row_of[request] for request in leaving])))
        for request in leaving:
            is_prefilled = request.num_answer and request not in self.prefilling
            if is_prefilled and (self.drafter is None or (request.speculate and not request.drafter_stale)):
                # Not the tokens of the last cycle: where it ended the answer, the drafter was not synced with it.
                self.pool.share(request.pages, request.page_keys, len(request.tokens) - 1 - self.lookahead)
            self.prefilling.pop(request, None)
            heapq.heappush(self.free_rows, self.row_of.pop(request))

    def _compact(self, decoding: Sequence[Request]) -> None:
        """The highest rows move into holes once a smaller graph holds all."""
        size = size_for(self.batch.sizes, len(self.row_of))
        if self.prefilling or size == size_for(self.batch.sizes, max(self.row_of.values()) + 1):
            return
        moving = {request: row for request, row in self.row_of.items() if row >= size}
        targets = [heapq.heappop(self.free_rows) for _ in moving]
        self.batch.slots.move(self.batch.upload(np.array(list(moving.values()))), self.batch.upload(np.array(targets)))
        for (request, source), target in zip(moving.items(), targets, strict=True):
            self.row_of[request] = target
            heapq.heappush(self.free_rows, source)

    # Policy

    def chunk_tokens(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> int:
        """Prompts up to a chunk are prefilled whole, together. Of longer ones, one chunk a step."""
        if remaining <= self.batch.piece:
            return remaining
        return 0 if any(not chunk.completes for chunk in chunks) else self.batch.piece

    def admits(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> bool:
        return remaining > self.batch.piece or remaining <= budget or not chunks

    def prefill_budget(self, num_decode_rows: int) -> int:
        return self.config.max_batched_tokens

    def least_reuse(self, num_tokens: int) -> int:
        """Attention over the cache is slower than a prompt's over itself and takes a pass of its own: it must save half of
        the prompt, or a whole chunk of a long one."""
        return min(-(-num_tokens // 2), self.batch.piece)

    def page_keys(self, request: Request, num_requests: int) -> PageKeys:
        return PageKeys(request.tokens, self.pool.page_size, drafted=self.batch.drafter is not None)

    @property
    def prefill_seconds(self) -> float:
        return self.batch.prompts.least_seconds

    def recompute_seconds(self, num_tokens: int) -> float | None:
        return self.batch.prompts.seconds_for(num_tokens)

    def cycles_ahead(self, *, expects_requests: bool) -> int:
        cycles = self.launch_ahead.cycles
        return min(cycles, MAX_CYCLES_BEFORE_PREFILL) if expects_requests else cycles

    def warm_up(self) -> list[str]:
        """Records the graphs that most requests need; the largest first, whose memory the others share."""
        batch = self.batch
        if not batch.graphs.capture:
            return []
        started, depths = time.perf_counter(), [0, *self.controller.acceptance.depths]
        modes, near, sizes = (CUT, SAMPLED, GREEDY), batch.reach_for(0), batch.sizes[::-1]
        shapes = [(size, depth, mode, *near) for size, mode, depth in product(sizes, modes, depths[::-1])]
        if near:  # long contexts come in small numbers
            few = [size for size in sizes if size <= FEW_LONG_ROWS]
            shapes += [(size, depth, mode) for size, mode, depth in product(few, modes, depths[::-1])]
        batch.graphs.record(shapes)
        longest = [*LONGEST[::-1], *([OVER_CACHE] if self.config.prefix_caching else [])]
        largest = size_for(TOKENS, min(batch.piece, TOKENS[-1]))
        tokens = [size for size in TOKENS[::-1] if size <= largest]
        batch.prompts.record(product(tokens, (4, 1), longest, modes))
        if self.config.max_model_len > batch.piece:
            batch.pieces.record([(batch.piece, mode) for mode in (MIDDLE, *modes)])
        return [f"recorded {len(shapes)} cycles and their prefill passes in {time.perf_counter() - started:.0f} s"]

    def check_integrity(self, running: Sequence[Request]) -> None:
        assert self.row_of.keys() <= set(running), "a request that left has a row"
        rows = sorted([*self.row_of.values(), *self.free_rows])
        assert rows == list(range(self.config.max_num_seqs)), "a row has two owners or none"
        assert self.prefilling.keys() <= self.row_of.keys(), "a prompt is prefilled without a row"


def mode_of(request: Request) -> int:
    params = request.params
    return how_chosen(0.0 if params.greedy else params.temperature, params.top_p, params.top_k, params.min_p)
