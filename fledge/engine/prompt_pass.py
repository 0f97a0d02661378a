"""Prompts through the target and the drafter, recorded once per size: eagerly such a pass is ten times as long as its work.

Prompts lie one after the other in a buffer that is a little longer than they are; what is left over belongs to no prompt, is
stored nowhere, and its rows are never read. One token at least is left over: ends of prompts that are not there point at it.

    tokens   | prompt A | prompt B | padding … |        ends  | A's last | B's last | the buffer's last … |

Prompts whose beginnings the cache holds go the same way from there on, but attend over the cache: `Rests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.engine.cuda_graphs import StepGraphs, size_for
from fledge.engine.fused_decoder import (
    BLOCK_TOKENS,
    BlockAttend,
    FusedAttend,
    FusedDecoder,
    PromptAttend,
    attends_by_device_lengths,
)
from fledge.engine.fused_drafter import FusedDrafter
from fledge.kernels.paged_attention import PagedKV

# Sizes that are recorded: tokens of a pass, its prompts, and the longest of them. Beyond them the work outlasts its launches.
TOKENS = sorted({64 << k for k in range(8)} | {768 << k for k in range(4)})
PROMPTS = [1, 4, 16, 64, 256]
LONGEST = [256, 1024]
OVER_CACHE = 0  # instead of the longest: `Rests`, whose blocks are all of one length


@dataclass
class Prompts:
    """Tokens of several prompts, one after the other, and where they go. All on the host."""

    tokens: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]
    slots: np.ndarray  # int64 [N], of the caches
    lengths: list[int]

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """The sizes of the recorded pass that holds them; None: none does."""
        wanted = (len(self.tokens) + 1, len(self.lengths), max(self.lengths))
        if any(size > sizes[-1] for size, sizes in zip(wanted, (TOKENS, PROMPTS, LONGEST), strict=True)):
            return None
        return (size_for(TOKENS, wanted[0]), size_for(PROMPTS, wanted[1]), size_for(LONGEST, wanted[2]))

    def padded(self, num_tokens: int, num_prompts: int) -> Prompts:
        """The same, with as many tokens and prompts as asked for; what is added is stored nowhere."""
        left = num_tokens - len(self.tokens)
        return Prompts(
            np.pad(self.tokens, (0, left)),
            np.pad(self.positions, (0, left)),
            np.pad(self.slots, (0, left), constant_values=-1),
            self.lengths + [0] * (num_prompts - len(self.lengths)),
        )


@dataclass
class Rests(Prompts):
    """Ends of prompts: `tokens`, `positions`, `slots` and `lengths` are theirs alone."""

    starts: list[int]  # tokens before them
    tables: np.ndarray  # int32 [S, P]: the prompts' pages

    @property
    def shape(self) -> tuple[int, int, int] | None:
        wanted = (len(self.tokens) + 1, len(self.lengths))
        if wanted[0] > TOKENS[-1] or wanted[1] > PROMPTS[-1]:
            return None
        return (size_for(TOKENS, wanted[0]), size_for(PROMPTS, wanted[1]), OVER_CACHE)

    def padded(self, num_tokens: int, num_prompts: int) -> Rests:
        more = num_prompts - len(self.lengths)
        padded = super().padded(num_tokens, num_prompts)
        tables = np.pad(self.tables, ((0, more), (0, 0)))
        return Rests(padded.tokens, padded.positions, padded.slots, padded.lengths, self.starts + [0] * more, tables)

    def blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`BlockAttend`'s places, page tables and lengths. Padding goes to the last block, which is empty."""
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
        tables = np.zeros((num_blocks, self.tables.shape[1]), dtype=np.int32)
        tables[: len(sequence)] = self.tables[sequence]
        block_lengths = np.zeros(num_blocks, dtype=np.int32)
        block_lengths[: len(sequence)] = starts[sequence] + ends
        return places, tables, block_lengths


@dataclass
class _Buffers:
    """What a recorded pass reads, and what it leaves, always in the same places."""

    tokens_3N: Tensor  # tokens, positions, slots
    offsets: Tensor  # int32 [S + 1]: where prompts begin; the last one's end
    ends: Tensor  # int64 [S]
    first_tokens: Tensor  # int64 [S]: set between the target's pass and the drafter's
    lengths: list[int]  # used where nothing is recorded
    blocks: tuple[Tensor, ...] | None  # places, page tables and lengths of `Rests`
    last_states: Tensor | None = None  # [S, D], the target's
    taps: Sequence[Tensor] = ()
    draft_states: Tensor | None = None  # [S, D]


class PromptPass:
    def __init__(
        self, fused: FusedDecoder, drafter: FusedDrafter | None, device: torch.device, *, max_pages: int, capture: bool
    ) -> None:
        """`max_pages`: of one prompt's page table."""
        self.fused, self.drafter, self.device, self.max_pages = fused, drafter, device, max_pages
        self.taps = drafter.taps if drafter is not None else ()
        self.buffers: dict[tuple[int, int, int], _Buffers] = {}
        self.current: _Buffers | None = None
        self.num_prompts = 0
        capture = capture and attends_by_device_lengths(fused.cache.keys)
        self.graphs = StepGraphs(self._run, device, capture=capture, harmless=nullcontext)
        self.pads = capture

    def target(self, prompts: Prompts) -> Tensor:
        """Keys and values into the cache; the states [S, D] of the prompts' last tokens."""
        shape, self.num_prompts = prompts.shape if self.pads else None, len(prompts.lengths)
        if shape is None:
            self.current = self._filled(prompts, None)
            self._target(self.current, max(prompts.lengths))
        else:
            self.buffers[shape] = self.current = self._filled(prompts.padded(*shape[:2]), self.buffers.get(shape))
            self.graphs.run("target", *shape)
        return self.current.last_states[: self.num_prompts]

    @torch.inference_mode()
    def record(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Ahead of use."""
        nothing = np.zeros(0, dtype=np.int64)
        for shape in shapes if self.graphs.capture else ():
            if shape not in self.buffers:
                empty = Prompts(nothing, nothing, nothing, [])
                if shape[-1] == OVER_CACHE:
                    empty = Rests(nothing, nothing, nothing, [], [], np.zeros((0, self.max_pages), dtype=np.int32))
                self.buffers[shape] = self._filled(empty.padded(*shape[:2]), None)
                self.graphs.record([("target", *shape)])
                if self.drafter is not None:
                    self.graphs.record([("drafter", *shape)])

    def draft(self, first_tokens: Tensor) -> Tensor:
        """After `target`: the same for the drafter, given the tokens that follow the prompts."""
        self.current.first_tokens[: self.num_prompts] = first_tokens
        shape = next((shape for shape, buffers in self.buffers.items() if buffers is self.current), None)
        if shape is None:
            self._draft(self.current, max(self.current.lengths))
        else:
            self.graphs.run("drafter", *shape)
        return self.current.draft_states[: self.num_prompts]

    def _run(self, network: str, *shape: int) -> None:
        # Run again on the same buffers it does the same again, so warming up needs no care.
        run = self._target if network == "target" else self._draft
        run(self.buffers[shape], shape[-1])

    def _target(self, buffers: _Buffers, longest: int) -> None:
        attend = self._attend(buffers, longest, self.fused.cache, self.fused.rope_table)
        x, buffers.taps = self.fused(self.fused.decoder.embed(buffers.tokens_3N[0]), attend, self.taps)
        buffers.last_states = x[buffers.ends]

    def _draft(self, buffers: _Buffers, longest: int) -> None:
        # pair (x1, g0), (x2, g1), … (the first token said, g of the prompt's last)
        following = buffers.tokens_3N[0].roll(-1).index_copy_(0, buffers.ends, buffers.first_tokens)
        attend = self._attend(buffers, longest, self.drafter.cache, self.drafter.rope_table)
        buffers.draft_states = self.drafter.read_prompts(buffers.taps, following, attend)[buffers.ends]

    def _attend(self, buffers: _Buffers, longest: int, cache: PagedKV, rope_table: Tensor) -> FusedAttend:
        _, positions, slots = buffers.tokens_3N
        if buffers.blocks is not None:
            return BlockAttend(cache, rope_table, positions, slots, *buffers.blocks)
        return PromptAttend(cache, rope_table, positions, slots, buffers.lengths, buffers.offsets, longest)

    def _filled(self, prompts: Prompts, into: _Buffers | None) -> _Buffers:
        num_tokens, lengths = len(prompts.tokens), np.array(prompts.lengths)
        offsets = np.concatenate([[0], lengths.cumsum()])
        ends = np.where(lengths > 0, offsets[1:] - 1, num_tokens - 1)
        tokens = np.stack([prompts.tokens, prompts.positions, prompts.slots])
        arrays = (tokens, offsets.astype(np.int32), ends, *(prompts.blocks() if isinstance(prompts, Rests) else ()))
        if into is None:
            whole, begins, ends, *blocks = (self._pinned(array).to(self.device, non_blocking=True) for array in arrays)
            first_tokens = torch.zeros(len(ends), dtype=torch.int64, device=self.device)
            return _Buffers(whole, begins, ends, first_tokens, prompts.lengths, tuple(blocks) or None)
        for tensor, array in zip((into.tokens_3N, into.offsets, into.ends, *(into.blocks or ())), arrays, strict=True):
            tensor.copy_(self._pinned(array), non_blocking=True)
        into.lengths = prompts.lengths
        return into

    def _pinned(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory()
