"""The supported families of targets, and how each one's config.json becomes `ModelConfig` fields.

`FAMILIES` is the only list of supported architectures; the table in `docs/models.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fledge.config_checks import mapping, number, shown, whole_number
from fledge.config_parts import MoEConfig, RopeConfig, rotary_share
from fledge.errors import ModelError

Config = Mapping[str, Any]
# Fields of `config.ModelConfig`, except the sizes, whose keys are the same in all families.
Fields = dict[str, Any]

SILU = ("silu", "swish")
SLIDING, FULL = "sliding_attention", "full_attention"  # values of `layer_types`
# Keys of similar architectures that are not supported, and the values with which they have no effect.
FOREIGN: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "clip_qkv": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "scoring_func": (None, "softmax"),
    "n_group": (None, 0, 1),
    "topk_group": (None, 0, 1),
    "n_shared_experts": (None, 0),
    "kv_lora_rank": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "parallel_attn": (None, False),
    "no_rope_layers": (None, [], ()),
    "dual_chunk_attention_config": (None, {}),
}


@dataclass(frozen=True)
class Family:
    """A supported architecture, as config.json names it."""

    name: str  # shown in docs
    models: str  # examples, shown in docs
    model_type: str
    read: Callable[[Config, int], Fields]  # makes the fields from config.json and the number of layers
    sets_apart: str = ""  # how it differs from Llama, shown in docs
    gguf: str | None = None  # its name in GGUF files; None: not read from GGUF
    defaults: Config = field(default_factory=dict)  # values of keys that its files leave out
    reads: tuple[str, ...] = ()  # keys of `FOREIGN` that this family supports


def read_fields(architecture: str, config: Config, num_layers: int) -> Fields:
    """The family's fields. Refuses models that are similar to the family but differ in a key of `FOREIGN` or `layer_types`."""
    for key, neutral in FOREIGN.items():
        if key not in FAMILIES[architecture].reads and config.get(key) not in neutral:
            raise ModelError(f"config.json: {key} {shown(config[key])} is not supported for {architecture}")
    kinds, fields = _kinds(config, num_layers), FAMILIES[architecture].read(config, num_layers)
    for layer, (kind, window) in enumerate(zip(kinds, fields["windows"], strict=False)):
        if kind != (FULL if window is None else SLIDING):
            with_what = f"sliding_window {window}" if window else "no sliding window"
            raise ModelError(f"config.json: layer_types {kind} of layer {layer} contradicts {with_what} of {architecture}")
    return fields


def _check_activation(config: Config, supported: tuple[str, ...] = SILU, key: str = "hidden_act") -> None:
    if (activation := config.get(key, supported[0])) not in supported:
        raise ModelError(f"activation {activation!r} ({key}) is not supported; supported: {supported[0]}")


def _biases(config: Config, *, always_qkv: bool = False) -> Fields:
    """The bias fields. `always_qkv`: queries, keys and values always have biases and the output never has, as in Qwen2."""
    asked = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": always_qkv or asked,
        "output_bias": asked and not always_qkv,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def _llama(config: Config, num_layers: int) -> Fields:
    _check_activation(config)
    return {"rope": RopeConfig.from_hf(config), "windows": (None,) * num_layers, **_biases(config)}


def _mistral(config: Config, num_layers: int) -> Fields:
    window = _window(config.get("sliding_window", 4096))
    return _llama(config, num_layers) | {"windows": _windows(config, num_layers, window)}


def _qwen(config: Config, num_layers: int) -> Fields:
    """Qwen has a sliding window only if `use_sliding_window` is set, and only from layer `max_window_layers` on."""
    first = whole_number({"max_window_layers": 28, **config}, "max_window_layers")
    kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return _llama(config, num_layers) | {"windows": _windows(config, num_layers, _qwen_window(config), kinds)}


def _qwen_window(config: Config) -> int | None:
    return _window(config.get("sliding_window", 4096)) if config.get("use_sliding_window", False) else None


def _qwen2(config: Config, num_layers: int) -> Fields:
    return _qwen(config, num_layers) | _biases(config, always_qkv=True)


def _qwen3(config: Config, num_layers: int) -> Fields:
    return _qwen(config, num_layers) | {"qk_norm": True}


def _qwen3_moe(config: Config, num_layers: int) -> Fields:
    moe = MoEConfig(
        num_experts=whole_number(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        experts_per_token=whole_number(config, "num_experts_per_tok"),
        intermediate_size=whole_number(config, "moe_intermediate_size"),
        normalise=bool(config.get("norm_topk_prob", False)),
        layers=_sparse_layers(config, num_layers),
    )
    # Unlike Qwen3 there is no `max_window_layers`: a window applies to all layers.
    return _llama(config, num_layers) | {"windows": (_qwen_window(config),) * num_layers, "qk_norm": True, "moe": moe}


def _qwen2_moe(config: Config, num_layers: int) -> Fields:
    fields = _qwen3_moe(config, num_layers)
    # As in transformers: every other layer below `max_window_layers` has the window.
    below = whole_number({"max_window_layers": 28, **config}, "max_window_layers")
    kinds = [SLIDING if layer % 2 == 0 and layer < below else FULL for layer in range(num_layers)]
    return fields | {
        "windows": _windows(config, num_layers, _qwen_window(config), kinds),
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "output_bias": False,
        "qk_norm": False,
        "moe": replace(fields["moe"], shared_intermediate_size=whole_number(config, "shared_expert_intermediate_size")),
    }


def _mixtral(config: Config, num_layers: int) -> Fields:
    moe = MoEConfig(
        num_experts=whole_number(config, "num_local_experts"),
        experts_per_token=whole_number(config, "num_experts_per_tok"),
        intermediate_size=whole_number(config, "intermediate_size"),
        layers=tuple(range(num_layers)),
    )
    window = _window(config.get("sliding_window"))
    return _llama(config, num_layers) | {"windows": _windows(config, num_layers, window), "moe": moe}


def _gemma3(config: Config, num_layers: int) -> Fields:
    _check_activation(config, ("gelu_pytorch_tanh",), "hidden_activation")
    # Two spellings: transformers 5 has a rope per kind of layer; older files have one rope_scaling, for the full layers only.
    by_kind = mapping(config, "rope_parameters")
    full = mapping(by_kind, "full_attention") or mapping(config, "rope_scaling")
    local = mapping(by_kind, "sliding_attention")
    full.setdefault("rope_theta", number(config, "rope_theta") or 1_000_000.0)
    local.setdefault("rope_theta", number(config, "rope_local_base_freq") or 10_000.0)
    longest = {"max_position_embeddings": config.get("max_position_embeddings")}
    head_dim = whole_number(config, "head_dim", 256)
    pattern = whole_number(config, "sliding_window_pattern", 6)
    if pattern < 1:
        raise ModelError(f"config.json: sliding_window_pattern must be positive, not {pattern}")
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    scalar = number(config, "query_pre_attn_scalar") or 256.0
    if scalar <= 0:
        raise ModelError(f"config.json: query_pre_attn_scalar must be positive, not {scalar}")
    window = _window(config.get("sliding_window", 4096))
    if window is None:
        raise ModelError("config.json: sliding_window null is not supported for Gemma 3: its local layers need a window")
    return {
        "rope": RopeConfig.from_hf({"rope_parameters": full, **longest}),
        "local_rope": RopeConfig.from_hf({"rope_parameters": local, **longest}),
        "windows": _windows(config, num_layers, window, kinds),
        **_biases(config),
        "qk_norm": True,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "unit_norms": True,
        "embedding_scale": whole_number(config, "hidden_size") ** 0.5,
        "query_scale": (head_dim / scalar) ** 0.5,
        "head_dim": head_dim,
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _gemma(config: Config, num_layers: int) -> Fields:
    """Gemma. Its first files say `gelu` but mean the tanh approximation; transformers reads them the same way."""
    _check_activation(config, ("gelu_pytorch_tanh", "gelu"))
    if config.get("hidden_activation"):
        _check_activation(config, ("gelu_pytorch_tanh",), "hidden_activation")
    return {
        "rope": RopeConfig.from_hf(config),
        "windows": (None,) * num_layers,
        **_biases(config),
        "activation": "gelu_tanh",
        "unit_norms": True,
        "embedding_scale": whole_number(config, "hidden_size") ** 0.5,
    }


def _seed_oss(config: Config, num_layers: int) -> Fields:
    return _llama(config, num_layers) | {"output_bias": bool(config.get("attention_out_bias", False))}


def _smollm3(config: Config, num_layers: int) -> Fields:
    """SmolLM3: every `no_rope_layer_interval`-th layer has no rope; a sliding window, if set, applies to these layers only."""
    interval = whole_number(config, "no_rope_layer_interval", 4)
    has_rope = config.get("no_rope_layers") or [(layer + 1) % max(interval, 1) for layer in range(num_layers)]
    if not isinstance(has_rope, list) or len(has_rope) < num_layers:
        raise ModelError(f"config.json: no_rope_layers must have a number for each of the {num_layers} layers")
    unrotated = tuple(layer for layer in range(num_layers) if not has_rope[layer])
    kinds = [SLIDING if layer in unrotated else FULL for layer in range(num_layers)]
    windows = _windows(config, num_layers, _qwen_window(config), kinds)
    return _llama(config, num_layers) | {"windows": windows, "unrotated": unrotated}


def _glm(config: Config, num_layers: int) -> Fields:
    _check_activation(config)
    return {
        "rope": RopeConfig.from_hf(config, partial=True),
        "rotated": _rotary_dim(config),
        "interleaved": True,
        "windows": (None,) * num_layers,
        "qkv_bias": bool(config.get("attention_bias", True)),
        "fused_files": ("gate_up_proj",),
    }


def _glm4(config: Config, num_layers: int) -> Fields:
    return _glm(config, num_layers) | {"sandwich_norms": True}


def _rotary_dim(config: Config) -> int:
    share = rotary_share(config)
    heads = whole_number(config, "num_attention_heads")
    head_dim = whole_number(config, "head_dim", whole_number(config, "hidden_size") // max(heads, 1))
    rotary_dim = int(head_dim * share)
    if not 0 < share <= 1 or rotary_dim % 2 or not rotary_dim:
        raise ModelError(
            f"config.json: partial_rotary_factor {share} of head_dim {head_dim} does not give a positive even number"
        )
    return rotary_dim


def _phi3(config: Config, num_layers: int) -> Fields:
    rotary_dim = _rotary_dim(config)
    rope = RopeConfig.from_hf(config, longrope=True, partial=True)
    if wrong := [len(x) for x in (rope.short_factor, rope.long_factor) if len(x) not in (0, rotary_dim // 2)]:
        raise ModelError(f"rope short_factor and long_factor must have {rotary_dim // 2} numbers, not {wrong[0]}")
    _check_activation(config)
    return {
        "rope": rope,
        "rotated": rotary_dim,
        "windows": _windows(config, num_layers, _window(config.get("sliding_window"))),
        **_biases(config),
        "fused_files": ("qkv_proj", "gate_up_proj"),
    }


def _window(value: Any) -> int | None:
    if not value:
        return None
    if (window := whole_number({"sliding_window": value}, "sliding_window")) < 1:
        raise ModelError(f"config.json: sliding_window must be positive, not {window}")
    return window


def _kinds(config: Config, num_layers: int) -> list[str]:
    """`layer_types`, checked; empty if the file has none and the family's rule applies."""
    kinds = config.get("layer_types") or []
    if kinds and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise ModelError(f"config.json: layer_types must name each of the {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (SLIDING, FULL)]:
        raise ModelError(f"config.json: layer_types {shown(unknown[0])} is not supported")
    return kinds


def _windows(config: Config, num_layers: int, window: int | None, own: Sequence[str] | None = None) -> tuple[int | None, ...]:
    """Sliding window per layer. `own`: the family's kinds of layers, used without `layer_types`; None: all have the window."""
    kinds = _kinds(config, num_layers) or own or [SLIDING] * num_layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _sparse_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    plain, step = config.get("mlp_only_layers") or [], whole_number(config, "decoder_sparse_step", 1)
    if not isinstance(plain, list) or step < 1:
        raise ModelError("config.json: mlp_only_layers must be a list and decoder_sparse_step positive")
    return tuple(layer for layer in range(num_layers) if layer not in plain and (layer + 1) % step == 0)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("Llama", "Llama 2 to 3.3, SmolLM2, Yi", "llama", _llama, gguf="llama"),
    "MistralForCausalLM": Family(
        "Mistral",
        "Mistral 7B, Nemo, Small, Magistral; the text of Small 3.1 and 3.2",
        "mistral",
        _mistral,
        "a sliding window",
        gguf="llama",
    ),
    "MinistralForCausalLM": Family("Ministral", "Ministral 8B", "ministral", _mistral, "a sliding window in some layers"),
    "MixtralForCausalLM": Family(
        "Mixtral", "Mixtral 8x7B, 8x22B", "mixtral", _mixtral, "experts", defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5}
    ),
    "Qwen2ForCausalLM": Family(
        "Qwen2",
        "Qwen2, Qwen2.5, DeepSeek-R1-Distill; the text of Qwen2.5-VL",
        "qwen2",
        _qwen2,
        "biases of queries, keys and values",
        gguf="qwen2",
    ),
    "Qwen2MoeForCausalLM": Family(
        "Qwen2-MoE", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", "qwen2_moe", _qwen2_moe, "experts, and one shared by all tokens"
    ),
    "Qwen3ForCausalLM": Family(
        "Qwen3", "Qwen3 0.6B to 32B; the text of Qwen3-VL", "qwen3", _qwen3, "norms of queries and keys", gguf="qwen3"
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-MoE",
        "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        "qwen3_moe",
        _qwen3_moe,
        "Qwen3 with experts",
        gguf="qwen3moe",
    ),
    "GemmaForCausalLM": Family(
        "Gemma",
        "Gemma 2B and 7B, CodeGemma",
        "gemma",
        _gemma,
        "GeGLU, scaled embeddings",
        defaults={"head_dim": 256, "tie_word_embeddings": True},
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3",
        "Gemma 3 270M and 1B; the text of 4B, 12B, 27B",
        "gemma3_text",
        _gemma3,
        "norms around attention and MLP, GeGLU, scaled embeddings, a rope each for local and global layers",
        gguf="gemma3",
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-4",
        "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        "phi3",
        _phi3,
        "partial rotary embeddings, longrope",
        gguf="phi3",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3",
        "SmolLM3-3B",
        "smollm3",
        _smollm3,
        "layers without rope",
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
        reads=("no_rope_layers",),
    ),
    "SeedOssForCausalLM": Family(
        "Seed-OSS",
        "Seed-OSS-36B",
        "seed_oss",
        _seed_oss,
        "biases of queries, keys and values",
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "GlmForCausalLM": Family(
        "GLM-4",
        "GLM-4-9B (-hf), GLM-Edge",
        "glm",
        _glm,
        "partial rotary embeddings on adjacent pairs",
        defaults={"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    ),
    "Glm4ForCausalLM": Family(
        "GLM-4-0414",
        "GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
        "glm4",
        _glm4,
        "GLM-4 with norms around attention and MLP",
        defaults={"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    ),
}
