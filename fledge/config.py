"""Configurations of models and drafters, built from a Hugging Face `config.json` dictionary: frozen and without file access."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fledge.config_checks import LARGEST, architecture_of, check_sizes, mapping, number, shown, token_ids, whole_number
from fledge.config_parts import MLAConfig as MLAConfig
from fledge.config_parts import MoEConfig as MoEConfig
from fledge.config_parts import RopeConfig as RopeConfig
from fledge.errors import ModelError, printable
from fledge.families import FAMILIES, read_fields


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only target. The defaults are Llama's; the other fields are what other families change (`families`)."""

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
    moe: MoEConfig | None = None
    activation: str = "silu"  # activation of the MLP's gate: silu | gelu_tanh
    sandwich_norms: bool = False  # the outputs of attention and MLP are normed too, before they are added
    unit_norms: bool = False  # files store a norm's weight minus one; the loaded weight stays in fp32
    embedding_scale: float | None = None  # embeddings are multiplied by it
    query_scale: float = 1.0  # scores are multiplied by it, besides 1/sqrt(head_dim); folded into the query norm's weight
    local_rope: RopeConfig | None = None  # rope of the layers with a window; None: the same as all others
    unrotated: tuple[int, ...] = ()  # layers whose queries and keys are not rotated
    rotated: int | None = None  # number of dimensions of a head that are rotated; None: all
    interleaved: bool = False  # files rotate adjacent dimensions as a pair; the network pairs dimensions half a head apart
    fused_files: tuple[str, ...] = ()  # linears that files may also store fused in one tensor: qkv_proj, gate_up_proj
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "the model's configuration")
        for end in self.eos_token_ids:
            if not 0 <= end < self.vocab_size:
                raise ModelError(f"the end token {shown(end)} is outside the vocabulary of {self.vocab_size}")
        if self.rotary_dim > self.head_dim:
            raise ModelError(f"{self.rotary_dim} rotated dimensions are more than the head size of {self.head_dim}")

    @property
    def rotary_dim(self) -> int:
        return self.rotated or self.head_dim

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings in use: one, or two if some layers have their own; see `rope_of`."""
        second = RopeConfig(kind="none") if self.unrotated else self.local_rope
        return (self.rope,) if second is None else (self.rope, second)

    def rope_of(self, layer: int) -> int:
        """The index into `ropes` for this layer."""
        if self.unrotated:
            return int(layer in self.unrotated)
        return int(self.local_rope is not None and self.windows[layer] is not None)

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str = "the model") -> ModelConfig:
        architecture = architecture_of(config)
        if architecture in TEXT_PARTS:
            architecture, config = TEXT_PARTS[architecture], TEXT_DEFAULTS.get(architecture, {}) | text_part(config)
        if architecture not in FAMILIES:
            known = ", ".join((*FAMILIES, *TEXT_PARTS))
            raise ModelError(f"{name}: architecture {printable(architecture, 80)} is not supported; supported: {known}")
        config = {**FAMILIES[architecture].defaults, **config}
        try:
            num_heads, hidden_size = whole_number(config, "num_attention_heads"), whole_number(config, "hidden_size")
            num_layers = whole_number(config, "num_hidden_layers")
            # Checked here, before lists of this length are made.
            if not num_heads >= 1 or not 1 <= num_layers <= LARGEST["num_layers"]:
                raise ModelError(f"{name}: {num_layers} layers of {num_heads} heads are not a model")
            fields: dict[str, Any] = {
                "head_dim": whole_number(config, "head_dim", hidden_size // num_heads),
                "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            }
            try:
                fields |= read_fields(architecture, config, num_layers)
            except ModelError as error:
                raise ModelError(f"{name}: {error}") from None
            return cls(
                architecture=architecture,
                vocab_size=whole_number(config, "vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=whole_number(config, "intermediate_size"),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=whole_number(config, "num_key_value_heads", num_heads),
                max_positions=fields["rope"].longest(whole_number(config, "max_position_embeddings", 2048)),
                rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
                eos_token_ids=token_ids(config.get("eos_token_id")),
                bos_token_id=next(iter(token_ids(config.get("bos_token_id"), "bos_token_id")), None),
                **fields,
            )
        except KeyError as missing:
            raise ModelError(f"{name}: config.json lacks {missing}") from None


# Vision-language models whose language model is supported; requests with images are refused.
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
# Defaults of keys that their files leave out, where these differ from the defaults of the plain language model.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "Qwen2_5_VLForConditionalGeneration": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "Qwen3VLForConditionalGeneration": {"rope_theta": 5e5},
}


def is_supported(config: Mapping[str, Any]) -> bool:
    """Whether the architecture that config.json names is supported."""
    architecture = architecture_of(config)
    return architecture in FAMILIES or architecture in TEXT_PARTS


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the language model alone. Keys missing from `text_config` (end tokens, say) come from the whole model."""
    outer = {key: value for key, value in config.items() if key not in ("text_config", "vision_config", "architectures")}
    text = outer | mapping(config, "text_config")
    for key in ("rope_scaling", "rope_parameters"):
        rope = mapping(text, key)
        # mrope has three positions per token (time, height, width). In text all three are equal, so default rope is the same.
        if "mrope_section" in rope and rope.get("rope_type", rope.get("type")) == "mrope":
            text[key] = rope | {"type": "default", "rope_type": "default"}
    return text


@dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE drafter. EAGLE 3 and 3.1 differ only in `fc_norm` and `norm_output`."""

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
            # The rest of the code sees as many key/value heads as heads, each as wide as its whole key.
            assert (self.num_kv_heads, self.head_dim) == (self.num_heads, self.mla.qk_head_dim), "sizes of latent attention"
            assert not any((self.attention_bias, self.mlp_bias, self.qk_norm)), "latent attention has none of these"

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def attention(self) -> str:
        """A description of the attention for reports."""
        if self.mla is None:
            norms = ", queries and keys normed" if self.qk_norm else ""
            return f"{self.num_heads} query heads, {self.num_kv_heads} key/value heads{norms}"
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
    """The layers that vLLM and SGLang tap when a checkpoint names none: a low, a middle and a high one."""
    return (2, num_layers // 2, num_layers - 3)
