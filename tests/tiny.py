"""Tiny random networks for tests: they run in milliseconds, and their weights are large enough for varied greedy output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fledge.config import DrafterConfig, ModelConfig, MoEConfig, RopeConfig
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import RMSNorm

FULL_ROPE = RopeConfig(original_max_positions=512)
# Each family's settings, scaled to the tiny model. In two of the MoE families layer 1 has a plain MLP.
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "MixtralForCausalLM": {"moe": MoEConfig(4, 2, 64, layers=(0, 1, 2, 3))},
    "Qwen2MoeForCausalLM": {"qkv_bias": True, "moe": MoEConfig(6, 3, 32, False, 64, (0, 2, 3))},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "moe": MoEConfig(8, 3, 32, True, layers=(0, 2, 3))},
    "Gemma3ForCausalLM": {
        "qk_norm": True,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "unit_norms": True,
        "embedding_scale": 32**0.5,
        "query_scale": 0.5,
        "rope": RopeConfig(1e6, "linear", 8.0, 512),
        "local_rope": FULL_ROPE,
        "windows": (8, 8, None, 8),
    },
    "Phi3ForCausalLM": {"rotated": 6, "fused_files": ("qkv_proj", "gate_up_proj"), "rope": FULL_ROPE},
    "MinistralForCausalLM": {"windows": (None, 8, None, 8)},
    "GemmaForCausalLM": {"activation": "gelu_tanh", "unit_norms": True, "embedding_scale": 32**0.5},
    "SmolLM3ForCausalLM": {"unrotated": (1, 3)},
    "SeedOssForCausalLM": {"qkv_bias": True},
    "GlmForCausalLM": {"rotated": 4, "interleaved": True, "qkv_bias": True, "fused_files": ("gate_up_proj",)},
    "Glm4ForCausalLM": {
        "rotated": 4,
        "interleaved": True,
        "qkv_bias": True,
        "fused_files": ("gate_up_proj",),
        "sandwich_norms": True,
    },
}


def tiny_model_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 512,
        **FAMILY_SETTINGS.get(architecture, {}),
        **overrides,
    }
    settings.setdefault("windows", (None,) * settings["num_layers"])
    return ModelConfig(architecture=architecture, **settings)


def tiny_decoder(seed: int = 0, architecture: str = "LlamaForCausalLM", **overrides: Any) -> Decoder:
    return _randomised(Decoder(tiny_model_config(architecture, **overrides)), seed)


def tiny_drafter_config(target: ModelConfig | None = None, **overrides: Any) -> DrafterConfig:
    """A drafter that fits `target` (the default tiny model when not given)."""
    target = target or tiny_model_config()
    settings: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_positions": target.max_positions,
        "aux_layer_ids": (1, 2, 3),
    } | overrides
    if mla := settings.get("mla"):
        settings |= {"num_kv_heads": settings["num_heads"], "head_dim": mla.qk_head_dim}
    return DrafterConfig(**settings)


def tiny_drafter(config: DrafterConfig | None = None, seed: int = 1) -> EagleDrafter:
    """Random weights. A smaller draft vocabulary gets a random ascending choice of target ids as `d2t`."""
    config = config or tiny_drafter_config()
    drafter = _randomised(EagleDrafter(config), seed)
    if config.draft_vocab_size < config.vocab_size:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        drafter.d2t.copy_(chosen - torch.arange(config.draft_vocab_size))
    return drafter


@torch.no_grad()
def _randomised(network: nn.Module, seed: int) -> nn.Module:
    """Fills a network with weights much larger than trained ones, so that the two best logits are clearly apart."""
    generator = torch.Generator().manual_seed(seed)

    def fill(parameter: nn.Parameter, mean: float, std: float) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    for module in network.modules():
        if isinstance(module, nn.Embedding):
            fill(module.weight, 0.0, 1.0)
        elif isinstance(module, RMSNorm):
            fill(module.weight, 1.0, 0.1)
        elif isinstance(module, nn.Linear):
            fill(module.weight, 0.0, 0.4)
            if module.bias is not None:
                fill(module.bias, 0.0, 0.3)
    return network.eval().requires_grad_(False)
