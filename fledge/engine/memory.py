"""Memory: checks that a model fits its device, sizes the KV cache, reports what is used, and frees memory after loading.

    Needs        the estimate from the configuration, before anything is loaded: `check_fits` refuses what does not fit
    MemoryPlan   the memory of a running engine, shown to the user at the start

    weights   all parameters of target and drafter, shared ones once
    cache     2 (keys and values) x layers x key/value heads x head size x bytes per number, for each token
    tables    cosines and sines of every position, target and drafter (captured cycles only)
    rows      texts, stop ids and page tables of the running requests (captured cycles only)
In addition a step needs temporary memory: about 50 bytes x hidden size x tokens per step, freed after it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fledge.checkpoints.tensors import ShapesOnly
from fledge.config import DrafterConfig, ModelConfig
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.errors import UserError
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.bits import num_words
from fledge.kernels.linear.packed import PackedLinear
from fledge.kernels.quantization import BITS, GROUP_SIZE, ROUTER
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.speculation.methods.eagle import EagleSpeculator

# The KV cache's share of the memory that the weights leave; the rest is for graphs and libraries.
CACHE_SHARE = 0.85
GRAPH_BYTES = 1 << 30  # reserved for graphs and libraries instead, if the user gave the share of the GPU's memory to use
SCALES_BITS = {8: 16 / GROUP_SIZE, 4: 32 / GROUP_SIZE}  # bits of a group's scale and offset, per weight
MAPPINGS = Path("/proc/self/smaps")


@dataclass(frozen=True)
class Needs:
    """The bytes of device memory that an engine needs."""

    weights: int
    drafter: int
    loading: int  # temporary memory for reading and packing the largest linear
    step: int  # temporary memory of a step: activations of a prefill, logits of the largest batch
    cache_per_token: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        drafter: DrafterConfig | None = None,
        kept: Mapping[str, float] | None = None,
    ) -> Needs:
        """Estimates the needs. `config`: resolved for the model. `kept`: see `weight_bytes`."""
        return cls(
            weights=weight_bytes(model, config.weight_dtype, config.quantization, packed=config.is_cpu, kept=kept),
            drafter=0 if drafter is None else drafter_bytes(drafter, config.weight_dtype),
            loading=loading_bytes(config, model, is_plain=kept is None),
            step=50 * model.hidden_size * config.max_batched_tokens + 4 * model.vocab_size * min(8 * config.max_num_seqs, 1024),
            cache_per_token=sum(bytes_per_token(shape, config) for shape in (model, drafter) if shape is not None),
        )

    def cache_bytes(self, left: int, *, is_share: bool = False) -> int:
        """How many of the `left` bytes beside the weights the KV cache may take. `is_share`: the user gave the share of device
        memory to use."""
        return max((left - GRAPH_BYTES if is_share else int(left * CACHE_SHARE)) - self.step, 0)


def check_fits(
    config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None = None, kept: Mapping[str, float] | None = None
) -> None:
    """Refuses a model whose weights or longest request do not fit; the error names the figures and what to lower.

    `kept`: for a quantised checkpoint; see `weight_bytes`.
    """
    needs, memory = Needs.of(config, model, drafter, kept), memory_left(config)
    taken = needs.weights + needs.drafter
    can_shrink = kept is None and config.quantization != "int4"
    if config.is_cpu:
        if taken + needs.loading > memory:
            raise UserError(_too_large(needs, memory, "this machine", config, can_shrink=can_shrink))
        return
    where = torch.cuda.get_device_name(config.device) if torch.cuda.is_available() else config.device
    if taken + max(needs.step, needs.loading) > memory:
        raise UserError(_too_large(needs, memory, where, config, can_shrink=can_shrink))
    check_longest(config, needs, needs.cache_bytes(memory - taken, is_share=bool(config.gpu_memory_utilization)))


def check_longest(config: EngineConfig, needs: Needs, cache: int) -> None:
    """Raises if `cache` bytes do not hold the longest request."""
    tokens = config.kv_cache_tokens or config.max_model_len
    if tokens * needs.cache_per_token > cache:
        option = "--kv-cache-tokens" if config.kv_cache_tokens else "--max-model-len"
        what = "a cache" if config.kv_cache_tokens else "a request"
        raise UserError(
            f"{what} of {tokens} tokens needs {gib(tokens * needs.cache_per_token)} of cache and {gib(cache)} are left; "
            f"lower {option} to {cache // needs.cache_per_token} or less"
        )


def memory_left(config: EngineConfig) -> int:
    """Bytes of GPU memory that are free now, or that `gpu_memory_utilization` still allows; on CPU all of the RAM."""
    if config.is_cpu:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, total = torch.cuda.mem_get_info(config.device)
    if not config.gpu_memory_utilization:
        return free
    return min(free, int(total * config.gpu_memory_utilization) - torch.cuda.memory_reserved(config.device))


def cache_tokens(config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None) -> int:
    """The KV cache's size in tokens: all requests at full length, as far as the memory that is free now allows."""
    needs, memory = Needs.of(config, model, drafter), memory_left(config)
    if config.is_cpu:
        cache = memory // 4  # unused pages cost nothing: the system provides memory on first write
    else:
        cache = needs.cache_bytes(memory, is_share=bool(config.gpu_memory_utilization)) - config.reserved_bytes
    check_longest(config, needs, cache)
    return min(config.max_num_seqs * config.max_model_len, cache // needs.cache_per_token)


def weight_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    quantization: str = "none",
    *,
    packed: bool = False,
    kept: Mapping[str, float] | None = None,
) -> int:
    """Bytes of a target's weights, with linears as `quantize_linears` makes them; a GGUF file's count 8 bits, most have fewer.

    `packed`: on CPU, where a tied head is stored as a separate copy. `kept`: bits per weight of the linears that stay in a
    quantised checkpoint's format, by name; None: the checkpoint is not quantised.
    """
    with ShapesOnly():
        network = Decoder(model)
    layer_bits, head_bits = BITS.get(quantization, (8, 8))
    seen, total = set(), 0.0
    for name, module in network.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            bits = float(8 * dtype.itemsize)
            is_weight = isinstance(module, nn.Linear) and attribute == "weight"
            if is_weight and quantization != "none" and not name.endswith(ROUTER):
                bits = head_bits if name == "lm_head" else layer_bits
                bits += SCALES_BITS[int(bits)]
            elif is_weight and kept is not None and name in kept:
                bits = kept[name]
            elif id(parameter) in seen and not packed:
                continue
            seen.add(id(parameter))
            total += parameter.numel() * bits / 8
    return int(total)


def loading_bytes(config: EngineConfig, model: ModelConfig, *, is_plain: bool = True) -> int:
    """The temporary memory while the largest linear is loaded: its fp32 copy and intermediate results if it is packed or
    quantised, else a second copy if its parts are joined. On CPU an embedding is in fp32 until everything is packed."""
    with ShapesOnly():
        network = Decoder(model)
    largest = max(module.weight.numel() for module in network.modules() if isinstance(module, nn.Linear))
    if config.is_cpu:
        return 16 * largest + (4 - config.weight_dtype.itemsize) * model.vocab_size * model.hidden_size
    # The experts of a layer are stacked into one tensor.
    experts = 0 if model.moe is None else 2 * model.moe.num_experts * model.moe.intermediate_size * model.hidden_size
    if config.quantization != "none":
        return max(16 * largest, 2 * experts)
    return config.weight_dtype.itemsize * max(largest, experts) * (1 if is_plain else 2)


def bytes_per_token(shape: ModelConfig | DrafterConfig, config: EngineConfig) -> int:
    """Bytes per token in a network's KV cache."""
    return PagedKV.bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.kv_dtype)


def drafter_bytes(drafter: DrafterConfig, dtype: torch.dtype) -> int:
    with ShapesOnly():
        network = EagleDrafter(drafter)
    return dtype.itemsize * sum(parameter.numel() for parameter in network.parameters()) + 8 * drafter.draft_vocab_size


def gib(count: int) -> str:
    return f"{max(count, 0) / 2**30:.1f} GiB"


def _too_large(needs: Needs, memory: int, where: str, config: EngineConfig, *, can_shrink: bool) -> str:
    """The error message for a model that does not fit. `can_shrink`: --quantization can make it smaller."""
    parts = [f"weights {gib(needs.weights)}"]
    if needs.drafter:
        parts.append(f"drafter {gib(needs.drafter)}")
    if config.is_cpu or needs.loading > needs.step:
        parts.append(f"{gib(needs.loading)} while they are loaded")
    else:
        parts.append(f"a step {gib(needs.step)}")
    advice = ["use a smaller model"]
    if can_shrink:
        advice.insert(0, "add --quantization int4" if config.quantization == "int8" else "add --quantization int8 or int4")
    if config.gpu_memory_utilization:
        advice.insert(0, "raise --gpu-memory-utilization")
    elif not config.is_cpu and needs.weights + needs.drafter < memory:
        advice.insert(0, "lower --max-num-batched-tokens or --max-num-seqs")
    return f"the model does not fit {where}: {' + '.join(parts)}, and {gib(memory)} are free; {', or '.join(advice)}"


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a running engine, in bytes (`cache_tokens`: tokens)."""

    weights: int
    drafter_weights: int
    cache_per_token: int
    drafter_cache_per_token: int
    cache_tokens: int
    tables: int
    rows: int

    @property
    def cache(self) -> int:
        return (self.cache_per_token + self.drafter_cache_per_token) * self.cache_tokens

    @property
    def total(self) -> int:
        return self.weights + self.drafter_weights + self.cache + self.tables + self.rows

    def describe(self) -> str:
        per_token = self.cache_per_token + self.drafter_cache_per_token
        parts = [f"weights {readable(self.weights)}"]
        if self.drafter_weights:
            parts.append(f"drafter {readable(self.drafter_weights)}")
        parts.append(f"KV cache up to {readable(self.cache)} ({self.cache_tokens:,} tokens of {per_token:,} bytes)")
        if self.tables + self.rows:
            parts.append(f"tables and rows {readable(self.tables + self.rows)}")
        return f"memory: {' + '.join(parts)} = at most {readable(self.total)}"


def memory_plan(engine: Engine) -> MemoryPlan:
    model, config, drafter = engine.model, engine.config, engine.drafter
    seen: set[int] = set()  # storages: the drafter often shares the target's embedding and head
    weights = held_bytes(engine.decoder, seen)
    drafter_weights = drafter_per_token = 0
    head_dims = [model.head_dim] * len(model.ropes)
    if isinstance(drafter, EagleSpeculator):
        drafter_weights = held_bytes(drafter.network, seen)
        drafter_per_token = bytes_per_token(drafter.network.config, config)
        head_dims.append(drafter.network.config.rotary_dim)
    tables = rows = 0
    if isinstance(engine.executor, CudaGraphExecutor):
        longest = max(config.max_model_len + engine.executor.lookahead, 512)  # `Rotary` allocates at least 512 positions
        tables = sum(2 * longest * head_dim * 4 for head_dim in head_dims)
        num_rows = config.max_num_seqs + 1  # one is the dummy row
        rows = num_rows * 4 * (config.max_model_len + num_words(model.vocab_size) + engine.executor.batch.max_pages)
    return MemoryPlan(
        weights,
        drafter_weights,
        bytes_per_token(model, config),
        drafter_per_token,
        engine.pool.num_pages * engine.pool.page_size,
        tables,
        rows,
    )


def held_bytes(network: nn.Module, seen: set[int]) -> int:
    """Bytes of a network's weights in memory. `seen`: storages that are counted already; new ones are added."""
    total = 0
    for module in network.modules():
        if isinstance(module, PackedLinear):
            total += module.num_bytes
        kept = [b for name, b in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set]
        for tensor in (*module.parameters(recurse=False), *kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def readable(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def give_back_heap() -> None:
    """Returns free memory of the C library's heap to the system: 40 of 440 MB after loading SmolLM2 with drafter."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def give_back_code() -> None:
    """Returns memory of library code to the system, as most of it ran only during import: 67 of 230 MB after importing torch.

    Code that is called again is read from the system's file cache. Takes 10 ms.
    """
    if not MAPPINGS.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first = end = 0
    with MAPPINGS.open() as mappings:
        for line in mappings:
            words = line.split()
            if not words[0].endswith(":"):  # "first-end perms offset device inode path"
                is_code = words[1] == "r-xp" and words[4] != "0"
                first, end = (int(word, 16) for word in words[0].split("-")) if is_code else (0, 0)
            elif words[0] == "Anonymous:" and end and words[1] == "0":  # code that was modified in memory must be kept
                advise(first, end - first, mmap.MADV_DONTNEED)
