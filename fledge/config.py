"""Configurations: frozen, complete, free of files. Each is built from a Hugging Face `config.json` dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fledge.errors import ModelError

# Architectures the decoder serves, with what sets each apart from Llama.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": True},
    "Qwen2ForCausalLM": {"qkv_bias": True, "sliding_window": True},
    "Qwen3ForCausalLM": {"qk_norm": True, "sliding_window": True},
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched past the trained length."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | dynamic | llama3 | yarn
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn, DeepSeek's variant
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn

    KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads both spellings: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`."""
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if kind not in cls.KINDS:
            raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(cls.KINDS)}")
        if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ModelError("partial rotary embeddings (partial_rotary_factor < 1) are not supported")
        original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
            kind=kind,
            factor=float(scaling.get("factor") or 1.0),
            original_max_positions=int(original or config.get("max_position_embeddings") or 2048),
            low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
            high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            attention_factor=scaling.get("attention_factor"),
            mscale=scaling.get("mscale"),
            mscale_all_dim=scaling.get("mscale_all_dim"),
            truncate=bool(scaling.get("truncate", True)),
        )


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder-only target."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window per layer; None: full attention
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str = "the model") -> ModelConfig:
        architecture = (config.get("architectures") or ["(none named)"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            raise ModelError(f"{name}: architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}")
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelError(f"{name}: activation {activation!r} is not supported; supported: silu")
        if config.get("quantization_config"):
            raise ModelError(f"{name}: pre-quantised Hugging Face weights are not supported; use the plain checkpoint")
        try:
            num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
            hidden_size = int(config["hidden_size"])
            eos = config.get("eos_token_id")
            return cls(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or hidden_size // num_heads),
                max_positions=int(config.get("max_position_embeddings") or 2048),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=RopeConfig.from_hf(config),
                qkv_bias=bool(family.get("qkv_bias") or config.get("attention_bias", False)),
                output_bias=bool(config.get("attention_bias", False)) and architecture != "Qwen2ForCausalLM",
                mlp_bias=bool(config.get("mlp_bias", False)),
                qk_norm=bool(family.get("qk_norm", False)),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                windows=_windows(config, num_layers, architecture) if family.get("sliding_window") else (None,) * num_layers,
                eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (int(eos),)),
                bos_token_id=config.get("bos_token_id"),
            )
        except KeyError as missing:
            raise ModelError(f"{name}: config.json lacks {missing}") from None


def _windows(config: Mapping[str, Any], num_layers: int, architecture: str) -> tuple[int | None, ...]:
    """Sliding window per layer, with transformers' defaults: Mistral has one for all layers, Qwen switches it on by flag
    and from a layer upwards."""
    if architecture == "MistralForCausalLM":
        window, first = config.get("sliding_window", 4096), 0
    else:
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        first = int(config.get("max_window_layers", 28))
    if not window:
        return (None,) * num_layers
    if kinds := config.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek, Kimi): keys and values come from a narrow latent state, and one small rotated
    key is shared by all heads."""

    kv_lora_rank: int  # size of the latent state behind keys and values
    qk_nope_head_dim: int  # per head, without position
    qk_rope_head_dim: int  # rotated
    v_head_dim: int
    q_lora_rank: int | None = None  # size of the latent state behind queries; None: they come straight from the input

    def __post_init__(self) -> None:
        ranks = {"kv_lora_rank": self.kv_lora_rank, "v_head_dim": self.v_head_dim, "q_lora_rank": self.q_lora_rank or 1}
        parts = {"qk_nope_head_dim": self.qk_nope_head_dim, "qk_rope_head_dim": self.qk_rope_head_dim}
        if wrong := [name for name, size in (ranks | parts).items() if size < 1]:
            raise ModelError(f"latent attention needs {', '.join(wrong)} of at least 1")
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd: rotations go by pairs")
        if self.v_head_dim > self.qk_head_dim:
            raise ModelError(f"v_head_dim {self.v_head_dim} above qk_nope_head_dim + qk_rope_head_dim is not supported")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @staticmethod
    def rope_problem(rope: RopeConfig) -> str | None:
        """Why servers would not agree on these positions; None if they do."""
        if rope.kind not in ("default", "yarn"):
            return f"rope type {rope.kind!r} is not supported with latent attention; supported: default, yarn"
        if rope.kind == "default":
            return None
        if rope.attention_factor is not None or not rope.truncate:
            return "yarn's attention_factor and truncate are not supported with latent attention: vLLM ignores them"
        if bool(rope.mscale) != bool(rope.mscale_all_dim) and rope.mscale != 1.0:
            return "yarn's mscale and mscale_all_dim must both be set, or neither: readers disagree about one alone"
        return None


@dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE drafter. EAGLE 3 and 3.1 differ by `fc_norm` and `norm_output`, nothing else."""

    vocab_size: int  # the target's
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    aux_layer_ids: tuple[int, ...]  # target layers whose outputs are tapped; 0 = the embeddings
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_norm: bool = False  # 3.1: one RMSNorm per tapped state, before fc
    norm_output: bool = False  # 3.1: the state fed back is the one after the final norm
    norm_before_fc: bool = False  # one RMSNorm over the concatenated taps
    norm_before_residual: bool = False
    window: int | None = None  # the drafter attends to the last `window` tokens only
    own_embedding: bool = False  # False: the target's embedding is shared
    own_head: bool = True  # False: the target's head is shared
    qk_norm: bool = False  # an RMSNorm on each head's queries and keys, as in Qwen3
    mla: MLAConfig | None = None  # None: grouped-query attention

    def __post_init__(self) -> None:
        if self.mla is not None:
            # What the rest of the house sees: as many key/value heads as heads, each as wide as its whole key.
            assert (self.num_kv_heads, self.head_dim) == (self.num_heads, self.mla.qk_head_dim), "sizes of latent attention"
            assert not any((self.attention_bias, self.mlp_bias, self.qk_norm)), "latent attention has none of these"

    @property
    def rotary_dim(self) -> int:
        """How much of a head is rotated."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def attention(self) -> str:
        """For people."""
        if self.mla is None:
            norms = ", queries and keys normed" if self.qk_norm else ""
            return f"{self.num_heads} heads over {self.num_kv_heads}{norms}"
        queries = f", queries from {self.mla.q_lora_rank}" if self.mla.q_lora_rank else ""
        return f"{self.num_heads} heads of latent attention (MLA): keys and values from {self.mla.kv_lora_rank}{queries}"

    @property
    def version(self) -> str:
        if self.fc_norm and self.norm_output:
            return "3.1"
        if not self.fc_norm and not self.norm_output:
            return "3"
        return "3 + fc_norm" if self.fc_norm else "3 + norm_output"


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """What vLLM and SGLang tap when a checkpoint is silent: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)
