"""New requests enter: their prompts through the target and the drafter, their first tokens said, their rows filled.

All of it is one pass that is recorded once per size (eagerly it is ten times as long as its work) and reads one buffer, which
the host fills with one copy. Prompts lie one after the other in it; it is a little longer than they are. What is left over
belongs to no prompt, is stored nowhere, and its rows are never read. One token at least is left over: ends of prompts that are
not there point at it, and such prompts enter a row that is nobody's.

    tokens   | prompt A | prompt B | padding … |        ends  | A's last | B's last | the buffer's last … |

Prompts whose beginnings the cache holds go the same way from there on, but attend over the cache: `Rests`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fledge.engine.executors.batch_state import FIRST_STOP_ID, MAX_STOP_IDS, NewRows, Slots
from fledge.engine.executors.graphs import StepGraphs, size_for
from fledge.kernels.attention.metadata import BLOCK_TOKENS, AttentionMetadata
from fledge.models.decoder import Decoder
from fledge.ops.cuda_ops import CudaOps, attends_by_device_lengths
from fledge.speculation.methods.eagle import CapturedEagle

# Sizes that are recorded: tokens of a pass, its prompts, and the longest of them. Beyond them the work outlasts its launches.
TOKENS = sorted({64 << k for k in range(7)} | {768 << k for k in range(3)})
PROMPTS = [1, 4, 16, 64]
LONGEST = [256, 1024]
RECORDED_AT = 2  # the use of a size at which it is recorded, unless that was asked for before: a size may never come again
OVER_CACHE = 0  # instead of the longest: `Rests`, whose blocks are all of one length


def lengthened(array: np.ndarray, length: int, filling: float) -> np.ndarray:
    """The same with more entries at its end; `np.pad` takes ten times as long, and every row under way waits for it."""
    longer = np.full((length, *array.shape[1:]), filling, dtype=array.dtype)
    longer[: len(array)] = array
    return longer


@dataclass
class Prompts:
    """Tokens of several prompts, one after the other, where they go, and the rows they enter. All on the host."""

    tokens: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]
    slots: np.ndarray  # int64 [N], of the caches
    lengths: list[int]
    numbers: np.ndarray  # int64 [S, …] and
    fractions: np.ndarray  # float64 [S, 3]: as `NewRows` has them
    tables: np.ndarray  # int64 [S, P]: the prompts' pages

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """The sizes of the recorded pass that holds them; None: none does."""
        wanted = (len(self.tokens) + 1, len(self.lengths), max(self.lengths))
        if any(size > sizes[-1] for size, sizes in zip(wanted, (TOKENS, PROMPTS, LONGEST), strict=True)):
            return None
        return (size_for(TOKENS, wanted[0]), size_for(PROMPTS, wanted[1]), size_for(LONGEST, wanted[2]))

    def padded(self, num_tokens: int, num_prompts: int, nobody: int) -> Prompts:
        """The same, with as many tokens and prompts as asked for; what is added is stored nowhere and enters `nobody`."""
        numbers = lengthened(self.numbers, num_prompts, 0)
        numbers[len(self.lengths) :, 0] = nobody
        return replace(
            self,
            tokens=lengthened(self.tokens, num_tokens, 0),
            positions=lengthened(self.positions, num_tokens, 0),
            slots=lengthened(self.slots, num_tokens, -1),
            lengths=self.lengths + [0] * (num_prompts - len(self.lengths)),
            numbers=numbers,
            fractions=lengthened(self.fractions, num_prompts, 1.0),
            tables=lengthened(self.tables, num_prompts, 0),
        )

    def arrays(self) -> list[np.ndarray]:
        """What the pass reads, in its order."""
        lengths = np.array(self.lengths, dtype=np.int64)
        offsets = np.concatenate([[0], lengths.cumsum()])
        ends = np.where(lengths > 0, offsets[1:] - 1, len(self.tokens) - 1)
        tokens = np.stack([self.tokens, self.positions, self.slots])
        return [tokens, offsets, ends, self.numbers, self.fractions, self.tables]


@dataclass
class Rests(Prompts):
    """Ends of prompts: `tokens`, `positions`, `slots` and `lengths` are theirs alone."""

    starts: list[int]  # tokens before them

    @property
    def shape(self) -> tuple[int, int, int] | None:
        wanted = (len(self.tokens) + 1, len(self.lengths))
        if wanted[0] > TOKENS[-1] or wanted[1] > PROMPTS[-1]:
            return None
        return (size_for(TOKENS, wanted[0]), size_for(PROMPTS, wanted[1]), OVER_CACHE)

    def padded(self, num_tokens: int, num_prompts: int, nobody: int) -> Rests:
        padded = super().padded(num_tokens, num_prompts, nobody)
        return replace(padded, starts=self.starts + [0] * (num_prompts - len(self.starts)))

    def arrays(self) -> list[np.ndarray]:
        return [*super().arrays(), *self.blocks()]

    def blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places, tables and lengths of `AttentionMetadata.cached_prefill`. Padding goes to the last block, which is empty."""
        lengths, starts = np.array(self.lengths), np.array(self.starts)
        counts = -(-lengths // BLOCK_TOKENS)
        sequence = np.repeat(np.arange(len(counts)), counts)
        first = (np.arange(len(sequence)) - np.repeat(counts.cumsum() - counts, counts)) * BLOCK_TOKENS
        ends = np.minimum(first + BLOCK_TOKENS, lengths[sequence])
        num_blocks = len(self.tokens) // BLOCK_TOKENS + len(counts) + 1
        places = np.full(len(self.tokens), num_blocks * BLOCK_TOKENS - 1)
        block_ends = np.arange(1, len(sequence) + 1) * BLOCK_TOKENS
        sizes = ends - first
        places[: lengths.sum()] = np.arange(lengths.sum()) + np.repeat(block_ends - sizes.cumsum(), sizes)
        tables = np.zeros((num_blocks, self.tables.shape[1]), dtype=np.int64)
        tables[: len(sequence)] = self.tables[sequence]
        block_lengths = np.zeros(num_blocks, dtype=np.int64)
        block_lengths[: len(sequence)] = starts[sequence] + ends
        return places, tables, block_lengths


class Buffer:
    """What a recorded pass reads, always in the same place: arrays of eight-byte numbers, one after the other."""

    def __init__(self, arrays: Sequence[np.ndarray], device: torch.device) -> None:
        self.whole = torch.empty(sum(array.size for array in arrays), dtype=torch.int64, device=device)
        self.parts: list[Tensor] = []
        first = 0
        for array in arrays:
            part = self.whole[first : first + array.size]
            part = part.view(torch.float64) if array.dtype == np.float64 else part
            self.parts.append(part.view(array.shape))
            first += array.size

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        whole = torch.from_numpy(np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in arrays]))
        self.whole.copy_(whole.pin_memory() if self.whole.is_cuda else whole, non_blocking=True)


class RecordedPass(ABC):
    """What passes over prompts, and over pieces of long ones, have in common."""

    def __init__(
        self,
        decoder: Decoder,
        ops: CudaOps,
        drafter: CapturedEagle | None,
        slots: Slots,
        say_first: Callable[[NewRows, Tensor, int], Tensor],
        *,
        max_pages: int,
        capture: bool,
    ) -> None:
        """`say_first(new, states, how)`: fills rows and gives their first tokens. `max_pages`: of one prompt's page table."""
        self.decoder, self.ops, self.drafter = decoder, ops, drafter
        self.slots, self.say_first = slots, say_first
        self.device, self.max_pages = slots.seed.device, max_pages
        self.taps = drafter.taps if drafter is not None else ()
        # Run again on the same buffer a pass does the same again, so warming up needs no care.
        self.graphs = StepGraphs(self._run, self.device, capture=capture, harmless=nullcontext)
        self.uses: Counter[tuple] = Counter()

    @abstractmethod
    def _run(self, *shape: int) -> None:
        """The pass of this shape over what its buffer holds."""


class PromptPass(RecordedPass):
    def __init__(self, decoder: Decoder, ops: CudaOps, drafter: CapturedEagle | None, *others, max_pages: int, capture: bool):
        caches = [ops.cache, *([drafter.cache] if drafter is not None else [])]
        capture = capture and all(attends_by_device_lengths(cache.keys) for cache in caches)
        super().__init__(decoder, ops, drafter, *others, max_pages=max_pages, capture=capture)
        self.buffers: dict[tuple[int, int, int], Buffer] = {}
        self.pads = capture
        self.lengths: Sequence[int] = ()  # of the prompts that were read last

    def read(self, prompts: Prompts, how: int) -> None:
        shape = prompts.shape if self.pads else None
        self.uses[shape, how] += 1
        if shape is None or (self.uses[shape, how] < RECORDED_AT and (*shape, how) not in self.graphs.graphs):
            arrays = prompts.arrays()
            buffer = Buffer(arrays, self.device)
            buffer.fill(arrays)
            self._pass(buffer, prompts.lengths, max(prompts.lengths), how)
        else:
            prompts = prompts.padded(*shape[:2], self.slots.nobody)
            self._filled(shape, prompts)
            self.lengths = prompts.lengths
            self.graphs.run(*shape, how)

    @property
    def least_seconds(self) -> float:
        """What any pass takes at least, as far as is known."""
        return min(self.graphs.seconds.values(), default=0.0)

    def seconds_for(self, num_tokens: int) -> float | None:
        """Of the least recorded pass that holds so many tokens, if there is one; recorded with nothing to read."""
        return min((seconds for shape, seconds in self.graphs.seconds.items() if shape[0] > num_tokens), default=None)

    @torch.inference_mode()
    def record(self, shapes: Iterable[tuple[int, int, int, int]]) -> None:
        """Ahead of use: tokens, prompts, the longest of them, and how tokens are chosen."""
        nothing = np.zeros(0, dtype=np.int64)
        width = FIRST_STOP_ID + MAX_STOP_IDS
        for *shape, how in shapes if self.graphs.capture else ():
            shape = tuple(shape)
            tables = np.zeros((0, self.max_pages), dtype=np.int64)
            empty = Prompts(nothing, nothing, nothing, [], np.zeros((0, width), dtype=np.int64), np.zeros((0, 3)), tables)
            if shape[-1] == OVER_CACHE:
                empty = Rests(**vars(empty), starts=[])
            if (*shape, how) not in self.graphs.graphs:
                self._filled(shape, empty.padded(*shape[:2], self.slots.nobody))
                self.graphs.record([(*shape, how)])

    def _filled(self, shape: tuple[int, int, int], prompts: Prompts) -> None:
        arrays = prompts.arrays()
        if shape not in self.buffers:
            self.buffers[shape] = Buffer(arrays, self.device)
        self.buffers[shape].fill(arrays)

    def _run(self, num_tokens: int, num_prompts: int, longest: int, how: int) -> None:
        self._pass(self.buffers[num_tokens, num_prompts, longest], self.lengths, longest, how)

    def _pass(self, buffer: Buffer, lengths: Sequence[int], longest: int, how: int) -> None:
        """`lengths`: used where nothing is recorded."""
        (tokens, positions, slots), offsets, ends, numbers, fractions, tables, *blocks = buffer.parts
        new = NewRows(numbers, fractions, tables)
        places, block_tables, block_lengths = (blocks[0], *(part.int() for part in blocks[1:])) if blocks else (None,) * 3
        offsets = offsets.int()

        if blocks:
            meta = AttentionMetadata.cached_prefill(positions, slots, places, block_tables, block_lengths)
        else:
            meta = AttentionMetadata.prefill(positions, slots, lengths, offsets, longest)
        x, taps = self.decoder.run(self.decoder.embed(tokens), meta, self.ops, self.taps)
        first_tokens = self.say_first(new, x[ends], how)
        if self.drafter is not None:
            # pair (x1, g0), (x2, g1), … (the first token said, g of the prompt's last)
            following = tokens.roll(-1).index_copy_(0, ends, first_tokens)
            states = self.drafter.prefill(taps, following, meta)
            self.slots.draft_state.index_copy_(0, new.rows, states[ends])
