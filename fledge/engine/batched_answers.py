"""Thousands of prompts answered on one device at full width: the host only fills rows and reads results, always late.

    host     | fill | launch chunk 1 | read 0 | fill | launch chunk 2 | read 1 | …
    device          |   chunk 0  | prompts |   chunk 1    | prompts |   chunk 2  …

A chunk is a few replays of the decode step. The host reads what a chunk finished while the next one runs, so the device never
waits. A request's pages (prompt and longest answer) are reserved when it enters: nothing is allocated or preempted on the
way, and rows can change places by moving their page table, which lets a shrinking batch use a smaller graph.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.engine.config import EngineConfig
from fledge.engine.cuda_graphs import size_for
from fledge.engine.device_batch import DeviceBatch, Entry
from fledge.engine.device_timer import DeviceTimer
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter

STEPS_PER_CHUNK = 4
PROMPT_TOKENS_PER_PASS = 32768
PROMPTS_PER_PASS = 1024
# New prompts enter when there are so many, as a share of those under way: together, so that their pass is worth its launches.
REFILL_SHARE = 1 / 32


class Answer(NamedTuple):
    index: int  # of the prompt
    tokens: list[int]  # with the end token, if one came
    reason: str  # stop | length


@dataclass(frozen=True)
class Task:
    """What to generate, for a whole set of prompts."""

    max_tokens: int
    temperature: float
    top_p: float
    seed_of: Callable[[int], int]  # by the prompt's index
    stop_ids: tuple[int, ...]


@dataclass
class Progress:
    """Counts of one run, for reports."""

    steps: int = 0
    row_steps: int = 0  # rows computed, empty ones included
    answers: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    prompt_passes: int = 0

    @property
    def occupancy(self) -> float:
        """Share of the computed rows that gave a token; an answer's first token comes from the pass over its prompt."""
        return (self.answer_tokens - self.answers) / self.row_steps if self.row_steps else 0.0


@dataclass
class _Owner:
    index: int
    prompt: Sequence[int]
    pages: list[int]
    first_chunk: int  # the status of earlier chunks speaks of the row's former owner


class BatchedAnswers:
    """Runs one set of prompts at a time through the rows of a `DeviceBatch`."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        drafter: EagleDrafter | None = None,
        depth: int = 0,
        capture: bool,
        profile: bool = False,
    ) -> None:
        """`depth`: tokens drafted a step."""
        assert depth == 0 or drafter is not None
        self.decoder, self.config, self.depth = decoder, config, depth
        self.rows = DeviceBatch(decoder, config, drafter=drafter, capture=capture)
        self.timer = DeviceTimer(self.rows.device) if profile else None
        self.progress = Progress()
        self.busy = False

    def timed(self, name: str):
        return self.timer.span(name) if self.timer is not None else nullcontext()

    def run(self, prompts: Iterator[Sequence[int] | None], task: Task) -> Iterator[Answer]:
        """Prompts are taken as rows become free. None: nothing yet, the stream is asked again after the next chunk."""
        assert not self.busy, "one set of prompts at a time"
        self.busy = True
        try:
            run = _Run(self, prompts, task)
            while not run.done:
                yield from run.advance()
        finally:
            self.busy = False
            with torch.inference_mode():
                self.rows.slots.clear()


class _Run:
    """One set of prompts on its way through the rows."""

    def __init__(self, answers: BatchedAnswers, prompts: Iterator[Sequence[int] | None], task: Task) -> None:
        self.batch, self.prompts, self.task = answers, prompts, task
        self.rows = answers.rows
        how = Entry(0, (), (), 0, temperature=task.temperature, top_p=task.top_p).how
        self.step = (answers.depth, how)
        self.num_taken, self.all_taken = 0, False
        self.waiting: deque[tuple[int, Sequence[int]]] = deque()  # taken, with their indexes
        self.owners: dict[int, _Owner] = {}  # by row
        self.free_rows = list(range(answers.config.max_num_seqs))  # a heap: low rows first keeps the batch dense
        self.free_pages = list(range(answers.rows.num_pages))
        self.chunk = 0  # the next to launch
        self.snapshots: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.finished: deque[tuple[list[tuple[int, int]], Tensor, torch.cuda.Event | None]] = deque()

    @property
    def done(self) -> bool:
        return self.all_taken and not (self.waiting or self.owners or self.finished)

    @torch.inference_mode()
    def advance(self) -> list[Answer]:
        """One chunk is launched, the one before is read, and the answers found by the reading before that are handed on."""
        self.refill()
        self.compact()
        if self.owners:
            self.launch()
        ready = [answer for _ in range(len(self.finished)) for answer in self.take_answers()]
        if len(self.snapshots) > 1 or (self.snapshots and not self.owners):
            self.read_status()
        return ready

    def launch(self) -> None:
        size = self.size_for(max(self.owners) + 1)
        with self.batch.timed("decode"):
            for _ in range(STEPS_PER_CHUNK):
                self.rows.graphs.run(size, *self.step)
        self.batch.progress.steps += STEPS_PER_CHUNK
        self.batch.progress.row_steps += STEPS_PER_CHUNK * size
        state = self.rows.slots.state
        finished = torch.where(state.active == 0, state.answered, 0)  # length of the answer where it is finished
        self.snapshots.append((self.chunk, *self.rows.download(finished)))
        self.chunk += 1

    def read_status(self) -> None:
        """Finds the rows that finished, asks for their answers, and gives back their rows and pages."""
        chunk, snapshot, event = self.snapshots.popleft()
        if event is not None:
            event.synchronize()
        status = snapshot.numpy()
        rows = [row for row in np.flatnonzero(status).tolist() if row in self.owners and self.owners[row].first_chunk <= chunk]
        if not rows:
            return
        done = [(self.owners[row].index, int(status[row])) for row in rows]
        longest = max(count for _, count in done)
        state, taken = self.rows.slots.state, self.rows.upload(np.array(rows))
        places = (state.length - state.answered)[taken, None] + torch.arange(longest, device=taken.device)
        answers = state.tokens[taken].gather(1, places.clamp(max=state.tokens.shape[1] - 1).long())
        self.finished.append((done, *self.rows.download(answers)))
        for row in rows:
            self.free_pages.extend(self.owners.pop(row).pages)
            heapq.heappush(self.free_rows, row)

    def take_answers(self) -> list[Answer]:
        done, answers, event = self.finished.popleft()
        if event is not None:
            event.synchronize()
        self.batch.progress.answers += len(done)
        self.batch.progress.answer_tokens += sum(count for _, count in done)
        ready = []
        for (index, count), row in zip(done, answers.numpy(), strict=True):
            tokens = row[:count].tolist()
            ready.append(Answer(index, tokens, "stop" if tokens[-1] in self.task.stop_ids else "length"))
        return ready

    def take_prompts(self) -> None:
        """As many as there are rows: enough to see what could enter next."""
        while not self.all_taken and len(self.waiting) < self.batch.config.max_num_seqs:
            try:
                prompt = next(self.prompts)
            except StopIteration:
                self.all_taken = True
                return
            if prompt is None:
                return
            self.waiting.append((self.num_taken, prompt))
            self.num_taken += 1

    def refill(self) -> None:
        """New prompts take free rows, as many as the free pages hold."""
        self.take_prompts()
        fewest = int(len(self.owners) * REFILL_SHARE)
        if min(len(self.free_rows), len(self.waiting)) < (min(fewest, len(self.waiting)) if self.all_taken else fewest):
            return
        while self.waiting and self.free_rows:
            entering, num_tokens = [], 0
            while self.waiting and self.free_rows and len(entering) < PROMPTS_PER_PASS:
                length = len(self.waiting[0][1])
                num_pages = self.rows.pages_for(length, self.limit(length))
                if num_pages > len(self.free_pages) or (entering and num_tokens + length > PROMPT_TOKENS_PER_PASS):
                    break
                row, pages = heapq.heappop(self.free_rows), [self.free_pages.pop() for _ in range(num_pages)]
                self.owners[row] = _Owner(*self.waiting.popleft(), pages, self.chunk)
                entering.append(row)
                num_tokens += length
            if not entering:
                return
            with self.batch.timed("prompts"):
                self.rows.read_prompts([self.entry(row) for row in entering])
            self.batch.progress.prompt_tokens += num_tokens
            self.batch.progress.prompt_passes += 1

    def limit(self, prompt_length: int) -> int:
        return min(self.task.max_tokens, self.batch.config.max_model_len - prompt_length)

    def entry(self, row: int) -> Entry:
        owner, task = self.owners[row], self.task
        limit, seed = self.limit(len(owner.prompt)), task.seed_of(owner.index)
        return Entry(row, owner.prompt, owner.pages, limit, seed, task.temperature, task.top_p, task.stop_ids)

    def size_for(self, num_rows: int) -> int:
        return size_for(self.rows.sizes, num_rows)

    def compact(self) -> None:
        """When no prompts are left the batch shrinks: the highest rows move into holes once a smaller graph holds all."""
        if self.waiting or not self.owners:
            return
        size = self.size_for(len(self.owners))
        if size == self.size_for(max(self.owners) + 1):
            return
        sources = [row for row in self.owners if row >= size]
        targets = [heapq.heappop(self.free_rows) for _ in sources]
        self.rows.slots.move(self.rows.upload(np.array(sources)), self.rows.upload(np.array(targets)))
        for source, target in zip(sources, targets, strict=True):
            owner = self.owners[target] = self.owners.pop(source)
            owner.first_chunk = self.chunk
            heapq.heappush(self.free_rows, source)
