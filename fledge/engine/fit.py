"""Whether a model fits a device, before it is loaded: weights, what a step works with and one request's cache, against what
is free. The KV cache then gets what they leave."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fledge.checkpoints.tensors import ShapesOnly
from fledge.config import DrafterConfig, ModelConfig
from fledge.errors import UserError
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.quantization import BITS, GROUP_SIZE, ROUTER
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter

if TYPE_CHECKING:
    from fledge.engine.config import EngineConfig

# Of the memory that the weights leave: the rest is for graphs and libraries.
CACHE_SHARE = 0.85
GRAPH_BYTES = 1 << 30  # for these where the share of the device's memory is given: so it is used
SCALES_BITS = {8: 16 / GROUP_SIZE, 4: 32 / GROUP_SIZE}  # a weight's part of its group's scale and offset


@dataclass(frozen=True)
class Needs:
    """Bytes that an engine takes of a device."""

    weights: int
    drafter: int
    loading: int  # what reading and packing the largest linear takes beside the weights
    step: int  # what a step works with beside weights and cache: activations of a prefill, logits of the largest batch
    cache_per_token: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        drafter: DrafterConfig | None = None,
        kept: Mapping[str, float] | None = None,
    ) -> Needs:
        """`config`: resolved for the model. `kept`: see `weight_bytes`."""
        is_cpu = torch.device(config.device).type == "cpu"
        return cls(
            weights=weight_bytes(model, config.weight_dtype, config.quantization, packed=is_cpu, kept=kept),
            drafter=0 if drafter is None else drafter_bytes(drafter, config.weight_dtype),
            loading=loading_bytes(config, model, is_plain=kept is None),
            step=50 * model.hidden_size * config.max_batched_tokens + 4 * model.vocab_size * min(8 * config.max_num_seqs, 1024),
            cache_per_token=sum(
                PagedKV.bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.kv_dtype)
                for shape in (model, drafter)
                if shape is not None
            ),
        )

    def cache_bytes(self, left: int, *, is_share: bool = False) -> int:
        """Of what weights leave, what the cache may take. `is_share`: the user said how much of the device may be used."""
        return max((left - GRAPH_BYTES if is_share else int(left * CACHE_SHARE)) - self.step, 0)


def check_fits(
    config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None = None, kept: Mapping[str, float] | None = None
) -> None:
    """Refuses, with the figures and what to lower, a model whose weights or whose longest request have no room.

    `kept`: of a quantised checkpoint; see `weight_bytes`.
    """
    needs, memory = Needs.of(config, model, drafter, kept), memory_left(config)
    taken = needs.weights + needs.drafter
    can_shrink = kept is None and config.quantization != "int4"
    if torch.device(config.device).type == "cpu":
        if taken + needs.loading > memory:
            raise UserError(_too_large(needs, memory, "this machine", config, can_shrink=can_shrink))
        return
    where = torch.cuda.get_device_name(config.device) if torch.cuda.is_available() else config.device
    if taken + max(needs.step, needs.loading) > memory:
        raise UserError(_too_large(needs, memory, where, config, can_shrink=can_shrink))
    check_longest(config, needs, needs.cache_bytes(memory - taken, is_share=bool(config.gpu_memory_utilization)))


def check_longest(config: EngineConfig, needs: Needs, cache: int) -> None:
    """Refuses a longest request that `cache` bytes do not hold."""
    tokens = config.kv_cache_tokens or config.max_model_len
    if tokens * needs.cache_per_token > cache:
        option = "--kv-cache-tokens" if config.kv_cache_tokens else "--max-model-len"
        what = "a cache" if config.kv_cache_tokens else "a request"
        raise UserError(
            f"{what} of {tokens} tokens needs {gib(tokens * needs.cache_per_token)} of cache and {gib(cache)} are left; "
            f"lower {option} to {cache // needs.cache_per_token} or less"
        )


def memory_left(config: EngineConfig) -> int:
    """Bytes of the device that are free now, or that its share (`gpu_memory_utilization`) still allows; of a CPU, all."""
    device = torch.device(config.device)
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, total = torch.cuda.mem_get_info(device)
    if not config.gpu_memory_utilization:
        return free
    return min(free, int(total * config.gpu_memory_utilization) - torch.cuda.memory_reserved(device))


def weight_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    quantization: str = "none",
    *,
    packed: bool = False,
    kept: Mapping[str, float] | None = None,
) -> int:
    """Of a target. Quantised linears as `quantize_linears` makes them; a GGUF file's own at 8 bits, though most have fewer.

    `packed`: for the CPU, where a tied head is a copy of its own. `kept`: bits a weight of linears that stay as a quantised
    checkpoint has them; None: of a plain one.
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
    """What is in memory beside the weights when the largest linear is read: in fp32 where it is packed or quantised, with what
    that makes on the way, else once more where its parts are joined. An embedding is in fp32 until all is packed."""
    with ShapesOnly():
        network = Decoder(model)
    largest = max(module.weight.numel() for module in network.modules() if isinstance(module, nn.Linear))
    is_cpu = torch.device(config.device).type == "cpu"
    if is_cpu:
        return 16 * largest + (4 - config.weight_dtype.itemsize) * model.vocab_size * model.hidden_size
    # Experts of a layer are laid side by side.
    experts = 0 if model.moe is None else 2 * model.moe.num_experts * model.moe.intermediate_size * model.hidden_size
    if config.quantization != "none":
        return max(16 * largest, 2 * experts)
    return config.weight_dtype.itemsize * max(largest, experts) * (1 if is_plain else 2)


def drafter_bytes(drafter: DrafterConfig, dtype: torch.dtype) -> int:
    with ShapesOnly():
        network = EagleDrafter(drafter)
    return dtype.itemsize * sum(parameter.numel() for parameter in network.parameters()) + 8 * drafter.draft_vocab_size


def gib(count: int) -> str:
    return f"{max(count, 0) / 2**30:.1f} GiB"


def _too_large(needs: Needs, memory: int, where: str, config: EngineConfig, *, can_shrink: bool) -> str:
    """`can_shrink`: by --quantization."""
    is_cpu = torch.device(config.device).type == "cpu"
    parts = [f"weights {gib(needs.weights)}"]
    if needs.drafter:
        parts.append(f"drafter {gib(needs.drafter)}")
    if is_cpu or needs.loading > needs.step:
        parts.append(f"{gib(needs.loading)} while they are loaded")
    else:
        parts.append(f"a step {gib(needs.step)}")
    advice = ["use a smaller model"]
    if can_shrink:
        advice.insert(0, "add --quantization int4" if config.quantization == "int8" else "add --quantization int8 or int4")
    if config.gpu_memory_utilization:
        advice.insert(0, "raise --gpu-memory-utilization")
    elif not is_cpu and needs.weights + needs.drafter < memory:
        advice.insert(0, "lower --max-num-batched-tokens or --max-num-seqs")
    return f"the model does not fit {where}: {' + '.join(parts)}, and {gib(memory)} are free; {', or '.join(advice)}"
