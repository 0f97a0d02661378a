"""Parts of configurations: rotary embedding, mixture of experts, latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fledge.config_checks import LARGEST, mapping, number, shown, whole_number
from fledge.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the base frequency and how it is extended past the trained length."""

    theta: float = 10000.0
    kind: str = "default"  # one of KINDS, longrope, or none: nothing is rotated
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: yarn's 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn, DeepSeek's variant
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope: divides the frequencies if max_model_len is at most the original length,
    long_factor: tuple[float, ...] = ()  # and this one if it is longer

    KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
    OWN_KEYS: ClassVar = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        "longrope": ("short_factor", "long_factor", "attention_factor"),
    }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, longrope: bool = False, partial: bool = False) -> RopeConfig:
        """Reads both spellings: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`.

        `longrope`, `partial`: the family may use longrope, and partial rotary embeddings.
        """
        scaling = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if longrope and kind in ("su", "longrope"):  # the first Phi-3 files call it su
            kind = "longrope"
        elif not isinstance(kind, str) or kind not in cls.KINDS:
            raise ModelError(f"rope type {shown(kind)} is not supported; supported: {', '.join(cls.KINDS)}")
        if scaling.get("llama_4_scaling_beta"):
            raise ModelError("rope llama_4_scaling_beta (queries scaled by their position) is not supported")
        if not partial and rotary_share(config) != 1.0:
            raise ModelError("partial rotary embeddings (partial_rotary_factor < 1) are not supported for this family")
        source = scaling if scaling.get("original_max_position_embeddings") else config
        longest = whole_number(config, "max_position_embeddings", 2048)
        if kind == "longrope":
            return cls._longrope(config, scaling, whole_number(source, "original_max_position_embeddings", longest), longest)
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

    @classmethod
    def _longrope(cls, config: Mapping[str, Any], scaling: Mapping[str, Any], original: int, longest: int) -> RopeConfig:
        factor = number(scaling, "factor") or longest / max(original, 1)
        magnitude = number(scaling, "attention_factor")
        if magnitude is None:
            magnitude = 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
        theta = number(scaling, "rope_theta") or number(config, "rope_theta", 10000.0)
        short, long = _factors(scaling, "short_factor"), _factors(scaling, "long_factor")
        rope = cls(theta, "longrope", factor, original, attention_factor=magnitude, short_factor=short, long_factor=long)
        rope.check()
        return rope

    def to_hf(self) -> dict[str, Any]:
        """The config.json entries, in the spelling that every version of transformers and vLLM reads."""
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {"rope_type": self.kind}
        if self.kind == "longrope":
            scaling["type"] = self.kind
        for key in ("factor", *self.OWN_KEYS.get(self.kind, ())):
            if (value := getattr(self, key)) is not None:
                scaling[key] = list(value) if isinstance(value, tuple) else value
        if self.original_max_positions is not None:
            scaling["original_max_position_embeddings"] = self.original_max_positions
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def longest(self, max_positions: int) -> int:
        """The model's maximum length. With yarn it may exceed max_position_embeddings: model cards switch yarn on without
        raising that value, and vLLM derives the length from yarn alone."""
        if self.kind != "yarn" or self.original_max_positions is None:
            return max_positions
        return max(max_positions, int(self.original_max_positions * self.factor))

    def check(self) -> None:
        """Refuses values with which angles would not be finite at every position."""
        for name in ("theta", "factor", "original_max_positions", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < 1e30:
                raise ModelError(f"rope {name} must be positive, not {shown(getattr(self, name))}")
        if self.kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ModelError("rope low_freq_factor and high_freq_factor must differ")


def rotary_share(config: Mapping[str, Any]) -> float:
    """The fraction of a head that is rotated."""
    scaling = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    return number(scaling, "partial_rotary_factor") or number(config, "partial_rotary_factor") or 1.0


def _factors(scaling: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = scaling.get(key)
    numbers = isinstance(values, list) and all(isinstance(x, int | float) and 0 < x < 1e30 for x in values)
    if not numbers or not values:
        raise ModelError(f"rope {key} must be a list of positive numbers, not {shown(values)}")
    return tuple(float(x) for x in values)


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP: each token goes through the experts that the router scores highest."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # size of one expert
    normalise: bool = True  # the weights of the chosen experts sum to one
    shared_intermediate_size: int = 0  # size of the shared expert, which every token uses with its own gate; 0: none
    layers: tuple[int, ...] = ()  # which layers have experts; the others have a plain MLP

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= 4096:
            raise ModelError(f"config.json: the number of experts must lie between 1 and 4096, not {self.num_experts}")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"config.json: num_experts_per_tok must lie between 1 and {self.num_experts}, not {self.experts_per_token}"
            )
        for size in (self.intermediate_size, self.shared_intermediate_size or 1):
            if not 1 <= size <= LARGEST["intermediate_size"]:
                raise ModelError(f"config.json: an expert's intermediate size cannot be {size}")


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek, Kimi): keys and values are computed from a narrow latent state, and all heads
    share one small rotated key."""

    kv_lora_rank: int  # size of the latent state behind keys and values
    qk_nope_head_dim: int  # dimensions per head that are not rotated
    qk_rope_head_dim: int  # dimensions that are rotated
    v_head_dim: int
    q_lora_rank: int | None = None  # size of the latent state behind queries; None: they come straight from the input

    def __post_init__(self) -> None:
        ranks = {"kv_lora_rank": self.kv_lora_rank, "v_head_dim": self.v_head_dim, "q_lora_rank": self.q_lora_rank or 1}
        parts = {"qk_nope_head_dim": self.qk_nope_head_dim, "qk_rope_head_dim": self.qk_rope_head_dim}
        if wrong := [name for name, size in (ranks | parts).items() if size < 1]:
            raise ModelError(f"latent attention needs {', '.join(wrong)} of at least 1")
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; rotary embeddings need an even number")
        if self.v_head_dim > self.qk_head_dim:
            raise ModelError(f"v_head_dim {self.v_head_dim} above qk_nope_head_dim + qk_rope_head_dim is not supported")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @staticmethod
    def rope_problem(rope: RopeConfig) -> str | None:
        """Why servers would compute different positions for this rope; None if they agree."""
        if rope.kind not in ("default", "yarn"):
            return f"rope type {rope.kind!r} is not supported with latent attention; supported: default, yarn"
        if rope.kind == "default":
            return None
        if rope.attention_factor is not None or not rope.truncate:
            return "yarn's attention_factor and truncate are not supported with latent attention: vLLM ignores them"
        if bool(rope.mscale) != bool(rope.mscale_all_dim) and rope.mscale != 1.0:
            return "yarn's mscale and mscale_all_dim must both be set, or neither: engines disagree about one alone"
        return None
