"""Configurations: frozen, complete, free of files. Each is built from a Hugging Face `config.json` dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fledge.config_checks import LARGEST, architecture_of, check_sizes, mapping, number, shown, token_ids, whole_number
from fledge.errors import ModelError, printable

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
        scaling = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if not isinstance(kind, str) or kind not in cls.KINDS:
            raise ModelError(f"rope type {shown(kind)} is not supported; supported: {', '.join(cls.KINDS)}")
        partial = number(scaling, "partial_rotary_factor") or number(config, "partial_rotary_factor")
        if (partial or 1.0) != 1.0:
            raise ModelError("partial rotary embeddings (partial_rotary_factor < 1) are not supported")
        source = scaling if scaling.get("original_max_position_embeddings") else config
        longest = whole_number(config, "max_position_embeddings", 2048)
        rope = cls(
            theta=number(scaling, "rope_theta") or number(config, "rope_theta", 10000.0),
            kind=kind,
            factor=number(scaling, "factor", 1.0),
            original_max_positions=whole_number(source, "original_max_position_embeddings", longest),
            low_freq_factor=number(scaling, "low_freq_factor", 1.0),
            high_freq_factor=number(scaling, "high_freq_factor", 4.0),
            beta_fast=number(scaling, "beta_fast", 32.0),
            beta_slow=number(scaling, "beta_slow", 1.0),
            attention_factor=number(scaling, "attention_factor"),
            mscale=number(scaling, "mscale"),
            mscale_all_dim=number(scaling, "mscale_all_dim"),
            truncate=bool(scaling.get("truncate", True)),
        )
        rope.check()
        return rope

    def check(self) -> None:
        """Angles must be finite at every position."""
        for name in ("theta", "factor", "original_max_positions", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < 1e30:
                raise ModelError(f"rope {name} must be positive, not {shown(getattr(self, name))}")
        if self.kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ModelError("rope low_freq_factor and high_freq_factor must differ")


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

    def __post_init__(self) -> None:
        check_sizes(self, "the model's configuration")
        for end in self.eos_token_ids:
            if not 0 <= end < self.vocab_size:
                raise ModelError(f"the end token {shown(end)} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str = "the model") -> ModelConfig:
        architecture = architecture_of(config)
        family = FAMILIES.get(architecture)
        if family is None:
            known = ", ".join(FAMILIES)
            raise ModelError(f"{name}: architecture {printable(architecture, 80)} is not supported; supported: {known}")
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelError(f"{name}: activation {activation!r} is not supported; supported: silu")
        if config.get("quantization_config"):
            raise ModelError(f"{name}: pre-quantised Hugging Face weights are not supported; use the plain checkpoint")
        try:
            num_heads, hidden_size = whole_number(config, "num_attention_heads"), whole_number(config, "hidden_size")
            num_layers = whole_number(config, "num_hidden_layers")
            if not num_heads >= 1 or not 1 <= num_layers <= LARGEST["num_layers"]:  # before anything is as long as they say
                raise ModelError(f"{name}: {num_layers} layers of {num_heads} heads are not a model")
            return cls(
                architecture=architecture,
                vocab_size=whole_number(config, "vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=whole_number(config, "intermediate_size"),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=whole_number(config, "num_key_value_heads", num_heads),
                head_dim=whole_number(config, "head_dim", hidden_size // num_heads),
                max_positions=whole_number(config, "max_position_embeddings", 2048),
                rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
                rope=RopeConfig.from_hf(config),
                qkv_bias=bool(family.get("qkv_bias") or config.get("attention_bias", False)),
                output_bias=bool(config.get("attention_bias", False)) and architecture != "Qwen2ForCausalLM",
                mlp_bias=bool(config.get("mlp_bias", False)),
                qk_norm=bool(family.get("qk_norm", False)),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                windows=_windows(config, num_layers, architecture) if family.get("sliding_window") else (None,) * num_layers,
                eos_token_ids=token_ids(config.get("eos_token_id")),
                bos_token_id=next(iter(token_ids(config.get("bos_token_id"), "bos_token_id")), None),
            )
        except KeyError as missing:
            raise ModelError(f"{name}: config.json lacks {missing}") from None


def _windows(config: Mapping[str, Any], num_layers: int, architecture: str) -> tuple[int | None, ...]:
    """Sliding window per layer, with transformers' defaults: Mistral has one for all layers, Qwen switches it on by flag
    and from a layer upwards."""
    window, first = config.get("sliding_window", 4096), 0
    if architecture != "MistralForCausalLM":
        window = window if config.get("use_sliding_window", False) else None
        first = whole_number({"max_window_layers": 28, **config}, "max_window_layers")
    if not window:
        return (None,) * num_layers
    if (window := whole_number({"sliding_window": window}, "sliding_window")) < 1:
        raise ModelError(f"config.json: sliding_window must be positive, not {window}")
    if kinds := config.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelError(f"config.json: layer_types must name each of the {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(window if layer >= first else None for layer in range(num_layers))


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
        check_sizes(self, "the drafter's configuration")
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
