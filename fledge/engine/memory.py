"""What an engine takes of a device's memory, by formula, so that a user can see at the start where it goes.

    weights   every number of target and drafter, shared ones once
    cache     2 (keys and values) x layers x key/value heads x head size x bytes of a number, for each token
    tables    cosines and sines of every position, target and drafter (captured cycles only)
    rows      texts, stop ids and page tables of the running requests (captured cycles only)
Beside it stands what a step works with: about 50 bytes x hidden size x tokens a step, given back after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fledge.engine.engine import Engine
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.bits import num_words
from fledge.kernels.linear.packed import PackedLinear
from fledge.speculation.methods.eagle import EagleSpeculator


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes."""

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
    weights = weight_bytes(engine.decoder, seen)
    drafter_weights = drafter_per_token = 0
    head_dims = [model.head_dim]
    if isinstance(drafter, EagleSpeculator):
        drafter_weights = weight_bytes(drafter.network, seen)
        drafter_per_token = drafter.cache.keys.shape[0] * cache_bytes(drafter.cache.keys)
        head_dims.append(drafter.network.config.rotary_dim)
    tables = rows = 0
    if isinstance(engine.executor, CudaGraphExecutor):
        longest = max(config.max_model_len + engine.executor.lookahead, 512)  # the least that `Rotary` takes
        tables = sum(2 * longest * head_dim * 4 for head_dim in head_dims)
        num_rows = config.max_num_seqs + 1  # one is the dummy row
        rows = num_rows * 4 * (config.max_model_len + num_words(model.vocab_size) + engine.executor.batch.max_pages)
    return MemoryPlan(
        weights,
        drafter_weights,
        PagedKV.bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, config.kv_dtype),
        drafter_per_token,
        engine.pool.num_pages * engine.pool.page_size,
        tables,
        rows,
    )


def cache_bytes(keys: Tensor) -> int:
    """Of one token in one layer: a drafter's cache may have its own shape (latent attention)."""
    return 2 * keys.shape[1] * keys.shape[3] * keys.element_size()


def weight_bytes(network: nn.Module, seen: set[int]) -> int:
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
