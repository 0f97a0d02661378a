"""Serving on a GPU: requests join and leave between captured cycles, and the host reads what was said one cycle behind.

    host     | enter A | launch 1 | read A's first token | launch 2 | enter B | read 1 | launch 3 | read 2, B's first | …
    device             |  prompt A  |     cycle 1     |     cycle 2     |  prompt B  |     cycle 3   …

Newcomers enter behind the next cycle, which keeps the device busy while the host gets their prompts ready. Where the host takes
longer over what was said than the device over saying it, several cycles are launched and read together: `Pace`.
Before each launch every row gets the pages that the cycles under way and the next ones may fill. When none are left the
youngest request gives up its row and pages, keeps its text, and starts over from there before any newcomer; so do those that
plain cycles left behind when speculation pays again. A long prompt is read in pieces between cycles. What the cycle does not do
(trees, penalties, biases, processors, log-probabilities) goes to the eager engine, which shares the caches: `runs_captured`
decides, for each request, once.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fledge.engine.captured import can_capture, entry_of, how_of, runs_captured
from fledge.engine.cuda_graphs import size_for
from fledge.engine.cycle_times import CycleTimes
from fledge.engine.device_batch import DeviceBatch, Entry
from fledge.engine.engine import Engine
from fledge.engine.gathering import Gathering
from fledge.engine.kv_cache import PageKeys
from fledge.engine.load_depth import LoadDepth
from fledge.engine.pace import MOST_TOGETHER, Pace
from fledge.engine.request import Delta, Request
from fledge.engine.row_queue import RowQueue
from fledge.engine.row_reports import RowReports
from fledge.engine.slots import MAX_DEPTH
from fledge.engine.starting_over import StartingOver
from fledge.engine.warming_up import record_ahead
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.speculation.drafting import EagleSpeculator

# Cycles that those who wait to enter wait for at most.
MOST_BEFORE_ENTRY = 2


class DeviceEngine:
    """The same face as `Engine`."""

    def __init__(self, engine: Engine, *, capture: bool = True) -> None:
        assert can_capture(engine.drafter)
        self.engine, self.config, self.model = engine, engine.config, engine.model
        self.drafter, self.tokenizer, self.pool = engine.drafter, engine.tokenizer, engine.pool
        self.runner, self.requests, self.stats = engine.runner, engine.requests, engine.stats
        self.depth_control = engine.depth_control  # its guard watches the rows too
        network: EagleDrafter | None = None
        drafter_cache = None
        self.depths = LoadDepth(0)
        if isinstance(self.drafter, EagleSpeculator):
            network, drafter_cache = self.drafter.network, self.drafter.cache
            self.depths = LoadDepth(min(self.drafter.depth.limit, MAX_DEPTH))
        self.rows = DeviceBatch(
            engine.runner.decoder,
            self.config,
            drafter=network,
            capture=capture,
            cache=engine.cache,
            drafter_cache=drafter_cache,
        )
        self.scheduler = RowQueue(engine)
        self.free_rows = list(range(self.config.max_num_seqs))  # a heap: low rows first keeps the batch dense
        self.gathering = Gathering()
        self.pace = Pace()
        self.row_of: dict[str, int] = {}
        self.behind: set[str] = set()  # requests whose drafter state a plain step has left behind
        self.num_started_over = 0
        self.starting_over = StartingOver(self.depths)
        self.reach: tuple[int, ...] = ()  # of the next cycles: what their shapes end with
        self.seeds: dict[str, int] = {}  # of requests without one, for as long as they are here
        # Called with the rows that are drafted for and the depth, before cycles that draft are launched.
        self.before_drafts: Callable[[dict[int, Request], int], None] | None = None
        self.times = CycleTimes(self.rows.graphs.seconds)
        self.reports = RowReports(self.rows, self.depths, self.stats, self.depth_control, self.times, self.config.max_model_len)

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.engine.check_request(prompt, params)

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str | None = None, speculate: bool = True
    ) -> Request:
        request = self.engine.add_request(prompt, params, request_id=request_id, speculate=speculate)
        fits = self.rows.pages_for(len(prompt), self.limit(request)) <= self.pool.num_pages
        if fits and runs_captured(params, len(request.end_token_ids)):
            self.engine.scheduler.waiting.remove(request)
            self.scheduler.waiting_rows.append(request)
            if request.page_keys is not None:  # in rows the drafter reads every prompt
                request.page_keys = PageKeys(request.tokens, self.pool.page_size, drafted=self.drafter is not None)
        return request

    def limit(self, request: Request) -> int:
        return min(request.params.max_tokens, self.config.max_model_len - len(request.prompt))

    def abort(self, request: Request) -> None:
        """Frees a request's row and pages at once; its text so far stays with it."""
        if request in self.scheduler.waiting_rows or (request.id in self.row_of and not request.finished):
            request.finish("abort")
            self.leave([request])
        else:
            self.engine.abort(request)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Cycles are launched, and what those before them said is handed on."""
        deltas = self.engine.step()
        self.compact()
        num_started_over = self.num_started_over
        if self.depth_control.is_adaptive:
            self.catch_up()
        unread = self.launch()
        if self.num_started_over == num_started_over:  # what is under way of those that did is read first
            entries = self.enter()
            unread = unread + entries if unread else self.launch()
        said = self.reports.read(but_last=unread)
        self.leave([delta.request for delta in said if delta.finished])
        return deltas + said

    def enter(self) -> int:
        """Waiting requests take free rows in order of arrival, as far as pages and the step's token budget reach.

        How many passes said first tokens.
        """
        queue, entries = self.scheduler, []
        budget, num_waiting = 0 if self.gathers() else self.config.max_batched_tokens, len(queue.waiting_rows)
        while queue.waiting_rows and self.free_rows and budget > 0:
            request = queue.waiting_rows[0]
            found = self.cached_pages(request)
            length = len(request.tokens) - len(found) * self.pool.page_size  # what is left to read
            if entries and length > budget:
                break
            request.num_computed = self.pool.take(request.pages, found, request.page_keys)
            # A page for each row under way stays free, or its next growth would throw this one out again.
            spare = len(queue.owners) * self.pool.page_size
            if not self.pool.grow(request.pages, len(request.tokens) + self.rows.lookahead + 1, spare):
                self.pool.release(request.pages)
                break
            self.engine.scheduler.entered(request)
            queue.waiting_rows.popleft()
            row = self.row_of[request.id] = heapq.heappop(self.free_rows)
            queue.owners[row] = request
            if length > self.rows.piece:
                queue.reading.append((self.entry(row, request), request.num_computed))
            else:
                entries.append(self.entry(row, request))
                budget -= length
        for some in ([entry for entry in entries if not entry.cached], [entry for entry in entries if entry.cached]):
            if some:
                self.rows.read_prompts(some)
        if len(queue.waiting_rows) < num_waiting:
            self.gathering.entered(self.enterable, time.perf_counter())
        num_passes = bool(entries)
        if entries:
            self.was_read({entry.row: queue.owners[entry.row] for entry in entries})
        if queue.reading:
            entry, read = queue.reading.popleft()
            read = self.rows.read_piece(entry, read)
            if read < len(entry.prompt):
                queue.reading.appendleft((entry, read))
                self.reports.worked()
            else:
                self.was_read({entry.row: queue.owners[entry.row]})
                num_passes += 1
        return num_passes

    @property
    def enterable(self) -> int:
        return min(len(self.scheduler.waiting_rows), len(self.free_rows))

    def gathers(self) -> bool:
        """Whether those who wait should wait for more to come. Who had a row before has waited enough."""
        queue = self.scheduler.waiting_rows
        if queue and queue[0].num_answer:
            return False
        rows, pass_seconds = len(self.scheduler.owners), self.rows.prompts.least_seconds
        return self.gathering.goes_on(waiting=self.enterable, rows=rows, pass_seconds=pass_seconds, now=time.perf_counter())

    def cached_pages(self, request: Request) -> list[int]:
        """Pages that hold a prompt's beginning, if using them pays.

        Attention over the cache is slower than a prompt's over itself, and takes a pass of its own: it must save half of
        the prompt, or a whole piece of a long one.
        """
        found = self.pool.find(request.page_keys)
        return found if len(found) * self.pool.page_size >= min(len(request.tokens) / 2, self.rows.piece) else []

    def was_read(self, owners: dict[int, Request]) -> None:
        """Whole prompts are in the caches: they can be shared, and the first tokens are on their way."""
        for request in owners.values():
            self.pool.share(request.pages, request.page_keys, len(request.tokens))
        self.reports.snap(owners)

    def entry(self, row: int, request: Request) -> Entry:
        if request.params.seed is None and request.id not in self.seeds:
            self.seeds[request.id] = random.getrandbits(62)
        return entry_of(request, row, self.limit(request), self.seeds.get(request.id))

    def running_rows(self) -> dict[int, Request]:
        being_read = {entry.row for entry, _ in self.scheduler.reading}
        return {row: request for row, request in self.scheduler.owners.items() if row not in being_read}

    def launch(self) -> int:
        """The next cycles, if any row runs; how many were launched."""
        running = self.running_rows()
        if not running:
            return 0
        if self.reports.snapshots:
            self.pace.saw(self.reports.all_done)
        size = size_for(self.rows.sizes, max(running) + 1)
        how = max(how_of(request.params) for request in running.values())
        drafted_for = [row for row, request in running.items() if request.speculate and request.id not in self.behind]
        self.reach = self.rows.reach_for(self.most_keys(running))
        depth = self.choose_depth(size, how, running, drafted_for)
        if not depth:
            self.depths.fade()
        if drafted_for and not depth:
            self.rows.slots.state.depth_limit.index_fill_(0, self.rows.upload(np.array(drafted_for)), 0)
            self.behind |= {running[row].id for row in drafted_for}
        entering = self.scheduler.reading or self.enterable
        cycles = min(self.pace.cycles, MOST_BEFORE_ENTRY) if entering else self.pace.cycles
        self.grow(running, cycles * (depth + 1))
        if not running:
            return 0
        if depth and self.before_drafts is not None:
            self.before_drafts({row: running[row] for row in drafted_for if row in running}, depth)
        shape, drafted = (size, depth, how, *self.reach), frozenset(drafted_for)
        for _ in range(cycles):
            self.rows.graphs.run(*shape)
            self.reports.snap(running, depth, shape, drafted)
        return cycles

    def most_keys(self, running: dict[int, Request]) -> int:
        """That any row may have at the end of the cycles that are launched next."""
        longest = max(len(request.tokens) for request in running.values())
        return longest + self.reports.most_unread + MOST_TOGETHER * (MAX_DEPTH + 1) + self.rows.lookahead

    def grow(self, running: dict[int, Request], num_tokens: int) -> None:
        """Pages for what the cycles under way and the next ones may say; without enough, the youngest leave `running`."""
        num_tokens += self.reports.most_unread
        rows, places, pages = [], [], []
        short = [row for row, request in running.items() if self.room(request) < num_tokens]
        for row in sorted(short, key=lambda row: running[row].arrival):
            if row not in running:  # it made room for an older one
                continue
            request = running[row]
            before, most = len(request.pages), len(request.prompt) + self.limit(request)
            needed = min(len(request.tokens) + num_tokens, most) + self.rows.lookahead
            while not self.pool.grow(request.pages, needed):
                victim = max(self.scheduler.owners, key=lambda row: self.scheduler.owners[row].arrival)
                running.pop(victim, None)
                self.preempt(victim)
                if victim == row:
                    break
            else:
                grown = range(before, len(request.pages))
                rows, places, pages = rows + [row] * len(grown), places + list(grown), pages + request.pages[before:]
        if rows:
            self.rows.slots.add_pages(*self.rows.upload(np.array([rows, places, pages])))

    def room(self, request: Request) -> int:
        """Tokens that a row may still say in the pages it has."""
        return len(request.pages) * self.pool.page_size - self.rows.lookahead - len(request.tokens)

    def preempt(self, row: int) -> None:
        request = self.scheduler.owners[row]
        self.start_over(request)
        request.num_preemptions += 1
        self.scheduler.num_rows_preempted += 1

    def start_over(self, request: Request) -> None:
        """From its text, before any newcomer. What the cycles under way say of it is still read: it enters after that."""
        self.give_up([request])
        self.scheduler.waiting_rows.appendleft(request)
        request.num_computed = 0
        self.num_started_over += 1

    def catch_up(self) -> None:
        """Where the load has left room for speculation again, requests that plain cycles left behind start over."""
        queue, once = self.scheduler, self.starting_over.once
        if not self.behind or queue.waiting_rows or queue.reading:
            self.starting_over.held = 0
            return
        behind = [request for request in queue.owners.values() if request.id in self.behind and request.id not in once]
        # Each takes as many pages as it has, and a page for each row under way must be free when it enters.
        if not behind or self.pool.num_free < len(queue.owners) + len(behind):
            return
        drafted_for = [request for request in queue.owners.values() if request.speculate and request.id not in self.behind]
        drafted_for += behind
        size = size_for(self.rows.sizes, max(queue.owners) + 1)
        how = max(how_of(request.params) for request in queue.owners.values())
        # Nobody knows where an answer ends; half way is as good a guess as any.
        remaining = [min(request.num_answer, self.limit(request) - request.num_answer) for request in behind]
        if self.starting_over.is_due(
            lambda depth: self.seconds(size, depth, how),
            len(drafted_for) / len(queue.owners),
            self.allowed(drafted_for),
            remaining,
            self.rows.prompts.seconds_for(sum(len(request.tokens) for request in behind)),
        ):
            once |= {request.id for request in behind}
            for request in sorted(behind, key=lambda request: -request.arrival):
                self.start_over(request)

    def choose_depth(self, size: int, how: int, running: dict[int, Request], drafted_for: list[int]) -> int:
        """A cycle drafts equally deep for all its rows: where the guard has shortened some, it weighs that they gain less.

        Their rows' own limits stay: what was drafted and verified anyway may as well stand.
        """
        is_adaptive = self.depth_control.is_adaptive
        seconds = (lambda depth: self.seconds(size, depth, how)) if is_adaptive else (lambda depth: None)
        return self.depths.choose(len(drafted_for) / len(running), seconds, self.allowed([running[row] for row in drafted_for]))

    def allowed(self, requests: Sequence[Request]) -> list[int]:
        """How deep the guard lets each be drafted for; empty: as deep as was asked."""
        guard = self.depth_control.guard
        return [guard.depth(request) for request in requests] if guard is not None and guard.counts.shortened else []

    def seconds(self, size: int, depth: int, how: int) -> float | None:
        """What a cycle costs; None where nothing is captured. Recorded on first use."""
        shape = (size, depth, how, *self.reach)
        self.rows.graphs.record([shape])
        return self.times.seconds(shape)

    def leave(self, requests: list[Request]) -> None:
        """They are finished, in their rows or, interrupted, in the queue."""
        in_rows = [request for request in requests if request.id in self.row_of]
        self.give_up(in_rows)
        for request in requests:
            if request not in in_rows and request in self.scheduler.waiting_rows:
                self.scheduler.waiting_rows.remove(request)
            self.depth_control.forget(request)
            self.seeds.pop(request.id, None)
            self.starting_over.once.discard(request.id)
            self.requests.pop(request.id, None)

    def give_up(self, requests: list[Request]) -> None:
        """Their rows are stopped behind the cycles under way, before any that come: the pages can be given away at once."""
        if not requests:
            return
        rows, queue = [self.row_of.pop(request.id) for request in requests], self.scheduler
        self.rows.slots.stop(self.rows.upload(np.array(rows)))
        half_read = {entry.row for entry, _ in queue.reading}  # what comes back after an interruption has an answer already
        for row, request in zip(rows, requests, strict=True):
            del queue.owners[row]
            is_whole = request.num_answer and row not in half_read
            if is_whole and (self.drafter is None or (request.speculate and request.id not in self.behind)):
                # All but what the last cycle said: where it ended the answer, the drafter was not synchronised with it.
                self.pool.share(request.pages, request.page_keys, len(request.tokens) - 1 - self.rows.lookahead)
            self.behind.discard(request.id)
            self.pool.release(request.pages)
            heapq.heappush(self.free_rows, row)
        queue.reading = deque((entry, read) for entry, read in queue.reading if entry.row not in rows)

    def compact(self) -> None:
        """The highest rows move into holes once a smaller graph holds all, unless newcomers will take the holes."""
        owners, queue = self.scheduler.owners, self.scheduler
        if not owners or queue.reading or self.enterable:
            return
        size = size_for(self.rows.sizes, len(owners))
        if size == size_for(self.rows.sizes, max(owners) + 1):
            return
        sources = [row for row in owners if row >= size]
        targets = [heapq.heappop(self.free_rows) for _ in sources]
        self.rows.slots.move(self.rows.upload(np.array(sources)), self.rows.upload(np.array(targets)))
        for source, target in zip(sources, targets, strict=True):
            request = owners[target] = owners.pop(source)
            self.row_of[request.id] = target
            heapq.heappush(self.free_rows, source)

    def warm_up(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Records what most requests need before the first one comes: its first answer would wait a second or more for it."""
        if self.rows.graphs.capture:
            record_ahead(self.rows, [0, *self.depths.depths], say)

    def check_integrity(self) -> None:
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        self.pool.check_integrity([request.pages for request in everyone])
        rows = sorted([*self.scheduler.owners, *self.free_rows])
        assert rows == list(range(self.config.max_num_seqs)), "a row has two owners or none"
        assert self.row_of == {request.id: row for row, request in self.scheduler.owners.items()}
