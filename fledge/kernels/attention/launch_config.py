"""How `rope_attention` is launched: its programs, what each of them loads at once, and the counts that they meet by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.triton_support import attention_programs, multiprocessors, shared_memory


class LaunchConfig(NamedTuple):
    """Of a program."""

    # Of the keys, and of the values, that it has loaded before the queries are there: for 32768 256 keys of SmolLM2.
    first_bytes: int
    warps: int
    registers: int


# Few programs (`few_programs`) may fill a multiprocessor each; others leave room for a second one or for the kernels around
# them. Keys beyond the first come one block after the other: with 300 of them a step of four rows took 465 µs in the second
# and 385 in the first, with 150 403 and 384. Below 256 one row (365 and 384) and drafts lose a little; beyond all win.
FEW, SOME = LaunchConfig(65536, 8, 255), LaunchConfig(32768, 8, 128)
# Beyond so many keys the second is faster: there are KV splits enough for two programs a multiprocessor. (Of 8,192 keys the
# first takes three quarters of the second's time, of 32,768 a tenth more, of 131,072 a third more.)
FEW_KEYS = 16384
FEW_SHARED_MEMORY = 184 * 1024  # bytes that a program of the first may want; cards from Hopper's data centres have them
# Of all splits of a launch, until they are added up. Beyond it a program takes all splits of its rows.
MOST_PART_BYTES = 128 << 20
STREAMED_KEYS = 64
MOST_KEYS = 128  # of the blocks after the first


def few_programs(device: torch.device) -> int:
    """48 on an H200."""
    return multiprocessors(device) * 4 // 11


def choose_config(num_programs: int, max_keys: int, device: torch.device) -> LaunchConfig:
    if device.type != "cuda" or num_programs > few_programs(device) or max_keys > FEW_KEYS:  # the interpreter need not hurry
        return SOME
    return FEW if shared_memory(device) >= FEW_SHARED_MEMORY else SOME


def choose_programs(num_programs: int, splits: int, enough_programs: int, most_parts: int) -> int:
    """For the splits of each sequence and head: enough programs to fill the device twice, each with as many splits."""
    if 2 * num_programs > enough_programs or splits > most_parts:
        return 1
    each = -(-splits // max(2 * enough_programs // num_programs, 1))
    return -(-splits // each)


def arrival_counts(device: torch.device) -> Tensor:
    """How many programs of each sequence and head are done; every launch leaves zeros. Keys are shared out only below so many.

    Launches that may run at once (two engines, two streams) need one each.
    """
    return torch.zeros(attention_programs(device), dtype=torch.int32, device=device)
