"""The launch configuration of `rope_attention`: number of programs, keys each prefetches, counters of finished programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.triton_support import attention_programs, multiprocessors, shared_memory


class LaunchConfig(NamedTuple):
    """The launch configuration of a program."""

    # Bytes of keys, and as many of values, that it prefetches before the queries are ready; 32768 hold 256 keys of SmolLM2.
    first_bytes: int
    warps: int
    registers: int


# FEW: few programs (`few_programs`) may each fill a multiprocessor. SOME leaves room for a second one or for the kernels around
# it. Keys beyond the prefetched ones are loaded block by block: with 300 keys a step of four rows took 465 µs with SOME and 385
# with FEW, with 150 keys 403 and 384. Below 256 keys FEW is a little slower for one row (384, SOME 365) and for drafts; beyond,
# it is faster for all.
FEW, SOME = LaunchConfig(65536, 8, 255), LaunchConfig(32768, 8, 128)
# Beyond this many keys SOME is faster, as there are enough KV splits for two programs per multiprocessor. (With 8,192 keys FEW
# takes three quarters of SOME's time, with 32,768 a tenth more, with 131,072 a third more.)
FEW_KEYS = 16384
FEW_SHARED_MEMORY = 184 * 1024  # bytes of shared memory that a FEW program may need; data-centre Hopper GPUs have them
# Most bytes for the partial results of all splits of a launch. If they need more, one program computes all splits of its rows.
MOST_PART_BYTES = 128 << 20
STREAMED_KEYS = 64  # keys per block when nothing is prefetched
MOST_KEYS = 128  # most keys per block after the prefetched ones


def few_programs(device: torch.device) -> int:
    """The most programs of a launch that uses FEW: 48 on an H200."""
    return multiprocessors(device) * 4 // 11


def choose_config(num_programs: int, max_keys: int, device: torch.device) -> LaunchConfig:
    if device.type != "cuda" or num_programs > few_programs(device) or max_keys > FEW_KEYS:  # not cuda: Triton's interpreter
        return SOME
    return FEW if shared_memory(device) >= FEW_SHARED_MEMORY else SOME


def choose_programs(num_programs: int, splits: int, enough_programs: int, most_parts: int) -> int:
    """The number of programs for the splits of each sequence and head: enough to fill the device twice, with equal shares."""
    if 2 * num_programs > enough_programs or splits > most_parts:
        return 1
    each = -(-splits // max(2 * enough_programs // num_programs, 1))
    return -(-splits // each)


def arrival_counts(device: torch.device) -> Tensor:
    """Counters of finished programs per sequence and head; every launch resets them to 0. Keys are split over programs only if
    there are at most as many sequences and heads as counters.

    Launches that may run at the same time (two engines, two streams) need separate counters.
    """
    return torch.zeros(attention_programs(device), dtype=torch.int32, device=device)
