"""Makes models of published shapes with random weights on the device, and computes what a step must read and compute; for
`gpu.py --shape`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fledge.checkpoints.tensors import ShapesOnly
from fledge.config import DrafterConfig, ModelConfig, MoEConfig, RopeConfig, default_aux_layers
from fledge.kernels.formats.fp8 import quantize_fp8
from fledge.kernels.formats.packed_int import IntWeight
from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight, kept_fp8
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import RMSNorm, Rotary

DRAFT_VOCABULARY = 32_000
LLAMA3_ROPE = RopeConfig(500_000.0, "llama3", 8.0, 8192)


def _llama(*sizes: int, **more: Any) -> ModelConfig:
    return _model("LlamaForCausalLM", sizes, rms_norm_eps=1e-5, **more)


def _qwen2(*sizes: int) -> ModelConfig:
    return _model("Qwen2ForCausalLM", sizes, rope=RopeConfig(1e6), qkv_bias=True, tie_embeddings=True, rms_norm_eps=1e-6)


def _qwen3(*sizes: int) -> ModelConfig:
    return _model("Qwen3ForCausalLM", sizes, rope=RopeConfig(1e6), qk_norm=True, rms_norm_eps=1e-6)


def _qwen3_moe(*sizes: int) -> ModelConfig:
    experts = MoEConfig(128, 8, 768, layers=tuple(range(sizes[3])))
    return _model("Qwen3MoeForCausalLM", sizes, rope=RopeConfig(1e6), qk_norm=True, rms_norm_eps=1e-6, moe=experts)


def _model(architecture: str, sizes: tuple[int, ...], **more: Any) -> ModelConfig:
    """`sizes`: vocabulary, hidden, intermediate, layers, heads, key/value heads, head, positions."""
    return ModelConfig(architecture, *sizes, windows=(None,) * sizes[3], **more)


SHAPES: dict[str, ModelConfig] = {
    "135m": _llama(49152, 576, 1536, 30, 9, 3, 64, 8192, rope=RopeConfig(1e5), tie_embeddings=True),  # SmolLM2
    "0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, 64, 32768),  # Qwen2.5
    "1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, 128, 32768),
    "8b": _llama(128256, 4096, 14336, 32, 32, 8, 128, 131072, rope=LLAMA3_ROPE),  # Llama 3.1
    "14b": _qwen3(151936, 5120, 17408, 40, 40, 8, 128, 40960),  # Qwen3
    "32b": _qwen3(151936, 5120, 25600, 64, 64, 8, 128, 40960),
    "30b-a3b": _qwen3_moe(151936, 2048, 6144, 48, 32, 4, 128, 40960),  # Qwen3
}
# Shapes whose layers are quantised as in a checkpoint of that format; embedding and head stay plain.
FORMATS = {"8b-fp8": "fp8", "8b-int4": "awq"}
SHAPES |= dict.fromkeys(FORMATS, SHAPES["8b"])


def drafter_config(target: ModelConfig) -> DrafterConfig:
    """The configuration of an EAGLE 3.1 drafter with the target's width."""
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=min(DRAFT_VOCABULARY, target.vocab_size),
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        aux_layer_ids=default_aux_layers(target.num_layers),
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        fc_norm=True,
        norm_output=True,
    )


def random_decoder(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, format: str | None = None
) -> Decoder:
    """A decoder of random weights. `format`: quantisation of the layers' linears, a value of `FORMATS`."""
    with ShapesOnly():
        decoder = Decoder(config)
    _fill(decoder, device, dtype)
    for name, linear in list(decoder.named_modules()) if format else ():
        if isinstance(linear, nn.Linear) and name.startswith("layers."):
            weight = kept_fp8(quantize_fp8(linear.weight)) if format == "fp8" else awq_weight(linear.weight)
            assert weight is not None
            owner, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(owner), attribute, QuantizedLinear(weight, linear.bias))
    if config.tie_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    decoder.set_rotary(device=device)
    return decoder


def awq_weight(weight_OI: torch.Tensor, group: int = 128) -> QuantizedWeight:
    """The weight rounded to four bits with a scale and a zero point per group, in the form that AWQ files are loaded in."""
    groups = weight_OI.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    weight = IntWeight(codes.flatten(1).to(torch.int16), zeros.to(torch.int16), scales, 4).exact()
    assert weight is not None
    return weight


def random_drafter(config: DrafterConfig, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> EagleDrafter:
    with ShapesOnly():
        drafter = EagleDrafter(config)
    _fill(drafter, device, dtype)
    # The draft vocabulary: target tokens in ascending order, evenly spread.
    ids = torch.arange(config.draft_vocab_size)
    drafter.d2t = (ids * config.vocab_size // config.draft_vocab_size - ids).to(device)
    drafter.rotary = Rotary(config.rotary_dim, config.max_positions, config.rope).to(device)
    return drafter


def _fill(network: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Fills every tensor on the device, in its final type. Outputs of linears and logits have a spread of about one, so the two
    best tokens are close and a difference in rounding shows in the text."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(network.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        module = network.get_submodule(owner)
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        if isinstance(module, RMSNorm):
            value.fill_(1.0)
        else:
            value.normal_(0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.02, generator=generator)
        setattr(module, attribute, nn.Parameter(value, requires_grad=False))
    network.eval()


def random_prompts(config: ModelConfig, count: int, length: int, least: int | None = None) -> list[list[int]]:
    """Random prompts. `least`: lengths vary from `least` to `length`; None: all have `length`."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, config.vocab_size, (count, length), generator=generator).tolist()
    shortest = length if least is None else least
    return [prompt[: shortest + (length - shortest) * index // count] for index, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Work:
    """The bytes that a pass must read and its operations, and the least time these take on the device."""

    config: ModelConfig
    drafter: DrafterConfig | None
    itemsize: int = 2
    layer_bits: float | None = None  # bits per weight of the layers' linears; None: as all other weights
    bytes_per_s: float = 4.8e12
    flops_per_s: float = 990e12

    @property
    def all_weights(self) -> float:
        """Bytes of all weights, with the embedding; a tied one counts once."""
        return self.itemsize * (num_parameters(self.config) - self._saved(self._layer_linears))

    def _saved(self, num_weights: float) -> float:
        """Bytes that quantisation saves, in units of `itemsize`."""
        return 0.0 if self.layer_bits is None else num_weights * (1 - self.layer_bits / 8 / self.itemsize)

    def read_experts(self, tokens: int) -> float:
        """The fraction of the experts that this many tokens read, if the router chooses at random."""
        moe = self.config.moe
        return 1.0 if moe is None else 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens

    def cycle_us(self, rows: int, context: int, depth: int) -> float:
        """The least time of a plain step (depth 0) or of a cycle: the larger of the times for memory and for arithmetic."""
        config, verified = self.config, rows * (depth + 1)
        unread = self._experts * (1 - self.read_experts(verified))
        weights = self._linears - unread - self._saved(self._layer_linears - unread)
        flops = 2 * self._active * verified
        if depth and self.drafter is not None:
            fc, layer, head = drafter_parts(self.drafter)
            # fc and layer run over the accepted span, then depth - 1 steps of the layer; the head once per drafted token.
            weights += fc + depth * (layer + head)
            flops += 2 * (verified * (fc + layer) + rows * ((depth - 1) * layer + depth * head))
        cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * context
        return 1e6 * max((weights + cache) * self.itemsize / self.bytes_per_s, flops / self.flops_per_s)

    def prefill_flops(self, num_prompts: int, length: int) -> float:
        """Operations of a prefill, with causal attention; the head only for each prompt's last token."""
        config, tokens = self.config, num_prompts * length
        head = config.vocab_size * config.hidden_size
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * tokens * (length + 1) / 2
        return 2 * (self._active - head) * tokens + 2 * head * num_prompts + attention

    @property
    def _experts(self) -> int:
        """The number of weights in all experts."""
        moe = self.config.moe
        return 0 if moe is None else 3 * len(moe.layers) * moe.num_experts * moe.intermediate_size * self.config.hidden_size

    @property
    def _active(self) -> float:
        """The number of weights in the linears that one token uses, with the head."""
        moe = self.config.moe
        return self._linears if moe is None else self._linears - self._experts * (1 - moe.experts_per_token / moe.num_experts)

    @property
    def _layer_linears(self) -> int:
        return self._linears - self.config.vocab_size * self.config.hidden_size

    @property
    def _linears(self) -> int:
        """The number of weights in all linears, with the head."""
        embedding = 0 if self.config.tie_embeddings else self.config.vocab_size * self.config.hidden_size
        return num_parameters(self.config) - embedding


def num_parameters(config: ModelConfig) -> int:
    with ShapesOnly():
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def drafter_parts(config: DrafterConfig) -> tuple[int, int, int]:
    """The numbers of weights in the projection of the taps, in the layers, and in the head."""
    with ShapesOnly():
        network = EagleDrafter(config)

    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    return count(network.fc), sum(map(count, network.layers)), count(network.head)


def peak_rates(device: torch.device | str) -> dict[str, float]:
    """Peak bytes/s and dense bf16 operations/s from the device's datasheet, and bytes/s from its memory clock and bus width."""
    known = {"H200": (4.8e12, 990e12), "H100": (3.35e12, 990e12), "A100": (2.04e12, 312e12), "L40S": (0.864e12, 362e12)}
    if torch.device(device).type != "cuda":
        return {"bytes_per_s": 20e9, "flops_per_s": 100e9}  # a guess: without a GPU only the code is tested
    properties = torch.cuda.get_device_properties(device)
    clock, bus = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
    by_clock = 2 * clock * 1e3 * bus / 8
    bytes_per_s, flops = next((rates for name, rates in known.items() if name in properties.name), (by_clock, 0.0))
    if not bytes_per_s or not flops:
        raise SystemExit(f"the peak rates of {properties.name} are not known; add them to `peak_rates`")
    return {"bytes_per_s": bytes_per_s, "flops_per_s": flops, "bytes_per_s_by_clock": by_clock}
