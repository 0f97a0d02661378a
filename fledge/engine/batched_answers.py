"""Thousands of prompts answered on one device at full width: the host only fills rows and reads results, always late.

    host     | fill | launch chunk 1 | read 0 | fill | launch chunk 2 | read 1 | …
    device          |   chunk 0  | prompts |   chunk 1    | prompts |   chunk 2  …

A chunk is a few replays of the decode step. The host reads a chunk's `status` while the next one runs, so the device never
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
from fledge.engine.cuda_graphs import StepGraphs, batch_sizes
from fledge.engine.device_timer import DeviceTimer
from fledge.engine.fused_decoder import CacheAttend, FusedDecoder, PromptAttend
from fledge.engine.slots import Slots
from fledge.kernels.paged_attention import PagedKV
from fledge.kernels.sample import sample
from fledge.models.decoder import Decoder

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
    """The model, its cache and its graphs; runs one set of prompts at a time."""

    def __init__(self, decoder: Decoder, config: EngineConfig, *, capture: bool, profile: bool = False) -> None:
        self.decoder, self.config, self.capture = decoder, config, capture
        self.device = torch.device(config.device)
        model, size = decoder.config, config.page_size
        self.num_pages = -(-config.kv_cache_tokens // size)
        self.cache = PagedKV(
            model.num_layers,
            model.num_kv_heads,
            model.head_dim,
            self.num_pages,
            size,
            config.activation_dtype,
            self.device,
        )
        self.fused = FusedDecoder(decoder, self.cache, config.max_model_len)
        self.max_pages = -(-config.max_model_len // size)
        self.slots = Slots(config.max_num_seqs, config.max_model_len, self.max_pages, self.device)
        self.graphs: dict[bool, StepGraphs] = {}  # by whether top-p cuts
        self.timer = DeviceTimer(self.device) if profile else None
        self.progress = Progress()
        self.busy = False

    @torch.inference_mode()
    def prepare(self, task: Task) -> StepGraphs:
        """The step for this kind of task, recorded on first use. All rows are empty, so that recording has no effect."""
        self.slots.clear()
        self.slots.stop_ids.fill_(-1)
        self.slots.stop_ids[: len(task.stop_ids)] = torch.tensor(task.stop_ids, dtype=torch.int64, device=self.device)
        cuts = task.temperature > 0 and task.top_p < 1
        if cuts not in self.graphs:
            sizes = batch_sizes(self.config.max_num_seqs)
            self.graphs[cuts] = StepGraphs(lambda size: self.step(size, cuts), sizes, self.device, capture=self.capture)
        return self.graphs[cuts]

    def step(self, num_rows: int, cuts: bool) -> None:
        """One token for each of the first rows."""
        slots, page_size, rows = self.slots, self.config.page_size, slice(num_rows)
        active, length, table = slots.active[rows], slots.length[rows], slots.page_table[rows]
        position = (length - 1).clamp(min=0).long()
        page = table.gather(1, (position // page_size)[:, None])[:, 0].long()
        slot = torch.where(active, page * page_size + position % page_size, -1)
        attend = CacheAttend(self.cache, table, torch.where(active, length, 0), position[:, None])
        hidden, _ = self.fused(slots.token[rows], position, slot, attend)
        slots.commit(rows, self.choose(hidden, rows, cuts))

    def choose(self, hidden: Tensor, rows: slice | Tensor, cuts: bool) -> Tensor:
        slots = self.slots
        return sample(
            self.decoder.logits(hidden),
            slots.temperature[rows],
            slots.seed[rows],
            slots.answered[rows],
            slots.top_p[rows] if cuts else None,
        )

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
                self.slots.clear()


class _Run:
    """One set of prompts on its way through the rows."""

    def __init__(self, answers: BatchedAnswers, prompts: Iterator[Sequence[int] | None], task: Task) -> None:
        self.batch, self.prompts, self.task = answers, prompts, task
        self.graphs = answers.prepare(task)
        self.slots, self.device = answers.slots, answers.device
        self.page_size = answers.config.page_size
        self.num_taken, self.all_taken = 0, False
        self.waiting: deque[tuple[int, Sequence[int]]] = deque()  # taken, with their indexes
        self.owners: dict[int, _Owner] = {}  # by row
        self.free_rows = list(range(answers.config.max_num_seqs))  # a heap: low rows first keeps the batch dense
        self.free_pages = list(range(answers.num_pages))
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
        size = self.graphs.size_for(max(self.owners) + 1)
        with self.batch.timed("decode"):
            for _ in range(STEPS_PER_CHUNK):
                self.graphs.run(size)
        self.batch.progress.steps += STEPS_PER_CHUNK
        self.batch.progress.row_steps += STEPS_PER_CHUNK * size
        self.snapshots.append((self.chunk, *self.download(self.slots.status)))
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
        answers = self.slots.answers[:, :longest].index_select(0, self.upload(np.array(rows)))
        self.finished.append((done, *self.download(answers)))
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
                num_pages = -(-(length + self.limit(length)) // self.page_size)
                if num_pages > len(self.free_pages) or (entering and num_tokens + length > PROMPT_TOKENS_PER_PASS):
                    break
                row, pages = heapq.heappop(self.free_rows), [self.free_pages.pop() for _ in range(num_pages)]
                self.owners[row] = _Owner(*self.waiting.popleft(), pages, self.chunk)
                entering.append(row)
                num_tokens += length
            if not entering:
                return
            with self.batch.timed("prompts"):
                self.read_prompts(entering)
            self.batch.progress.prompt_tokens += num_tokens
            self.batch.progress.prompt_passes += 1

    def limit(self, prompt_length: int) -> int:
        return min(self.task.max_tokens, self.batch.config.max_model_len - prompt_length)

    def read_prompts(self, rows: list[int]) -> None:
        """One pass over several prompts: their keys and values into the cache, their first tokens committed."""
        owners = [self.owners[row] for row in rows]
        prompts = [owner.prompt for owner in owners]
        lengths = np.array([len(prompt) for prompt in prompts])
        offsets = np.concatenate([[0], lengths.cumsum()])
        sequence = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(offsets[-1]) - offsets[sequence]
        table = np.zeros((len(rows), self.batch.max_pages), dtype=np.int32)
        for place, owner in enumerate(owners):
            table[place, : len(owner.pages)] = owner.pages
        slots = table[sequence, positions // self.page_size].astype(np.int64) * self.page_size
        tokens = np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts])
        token_rows = self.upload(np.stack([tokens, positions, slots + positions % self.page_size]))
        limits = [self.limit(len(prompt)) for prompt in prompts]
        seeds = [self.task.seed_of(owner.index) for owner in owners]
        entries = self.upload(np.array([rows, lengths, limits, seeds, offsets[1:] - 1], dtype=np.int64))
        attend = PromptAttend(lengths.tolist(), self.upload(offsets.astype(np.int32)))

        hidden, _ = self.batch.fused(token_rows[0], token_rows[1], token_rows[2], attend)
        device_rows = entries[0]
        self.slots.fill(device_rows, *entries[1:4], self.upload(table), self.task.temperature, self.task.top_p)
        cuts = self.task.temperature > 0 and self.task.top_p < 1
        self.slots.commit(device_rows, self.batch.choose(hidden[entries[4]], device_rows, cuts))

    def compact(self) -> None:
        """When no prompts are left the batch shrinks: the highest rows move into holes once a smaller graph holds all."""
        if self.waiting or not self.owners:
            return
        size = self.graphs.size_for(len(self.owners))
        if size == self.graphs.size_for(max(self.owners) + 1):
            return
        sources = [row for row in self.owners if row >= size]
        targets = [heapq.heappop(self.free_rows) for _ in sources]
        self.slots.move(self.upload(np.array(sources)), self.upload(np.array(targets)))
        for source, target in zip(sources, targets, strict=True):
            owner = self.owners[target] = self.owners.pop(source)
            owner.first_chunk = self.chunk
            heapq.heappush(self.free_rows, source)

    def upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def download(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy on the host that is there once the event has passed."""
        if self.device.type == "cpu":
            return tensor.clone(), None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return copy, event
