"""Converts between a drafter's config.json (raw EAGLE 3 layout) and DrafterConfig. All problems are reported together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fledge.config import DrafterConfig, MLAConfig, ModelConfig, RopeConfig, default_aux_layers
from fledge.config_checks import architecture_of, mapping, shown
from fledge.errors import ModelError

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
)
# May have norms on queries and keys: in vLLM it has; some trainers use the name for a plain Llama. The weights decide.
QK_NORM_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
MLA_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMEagle3")
SUPPORTED = (*ARCHITECTURES, QK_NORM_ARCHITECTURE, *MLA_ARCHITECTURES)
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def named_layers(raw: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The layer ids at top level, where vLLM reads them, and those inside `eagle_config`; empty: not named there."""
    top, nested = (part.get(LAYER_IDS) or () for part in (raw, mapping(raw, "eagle_config")))
    try:
        return [int(i) for i in top], [int(i) for i in nested]
    except (TypeError, ValueError, OverflowError):
        raise ModelError(f"{LAYER_IDS} must be a list of layers, not {shown(top or nested)}") from None


def drafter_config_from_hf(raw: Mapping[str, Any], target: ModelConfig | None = None) -> DrafterConfig:
    """The configuration from a raw config.json alone; only the weights tell whether it has its own embedding and head."""
    config, problems = parse_config(raw, target, None)
    if problems or config is None:
        raise ModelError("the drafter's config.json: " + "; ".join(problems))
    return config


def parse_config(
    raw: Mapping[str, Any], target: ModelConfig | None, tensor_names: Collection[str] | None
) -> tuple[DrafterConfig | None, list[str]]:
    """Returns the configuration (None if it cannot be read) and all problems. `tensor_names` None: weights are not known."""
    architecture = architecture_of(raw)
    if architecture not in SUPPORTED:
        return None, [f"architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}"]
    reader = _ConfigReader(raw, target, architecture)
    try:
        config = reader.read()
    except ModelError as error:
        return None, [*reader.problems, str(error)]
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        return None, [*reader.problems, f"config.json has a value of the wrong kind ({error})"]
    if config is None:
        return None, reader.problems
    if tensor_names is not None:
        config = replace(
            config,
            own_embedding="embed_tokens.weight" in tensor_names,
            own_head="lm_head.weight" in tensor_names,
            qk_norm=config.qk_norm and "midlayer.self_attn.q_norm.weight" in tensor_names,
        )
        reader.check_sharing(config)
    return config, reader.problems


@dataclass
class _ConfigReader:
    raw: Mapping[str, Any]
    target: ModelConfig | None
    architecture: str
    problems: list[str] = field(default_factory=list)

    def read(self) -> DrafterConfig | None:
        raw = self.raw
        needed = ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
        is_mla = self.architecture in MLA_ARCHITECTURES
        lacking = [key for key in (*needed, *(MLA_SIZES if is_mla else ())) if raw.get(key) is None]
        if lacking:
            self.problems.append(f"config.json lacks {', '.join(lacking)}")
        if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
            self.problems.append(f"activation {activation!r} is not supported; supported: silu")
        if raw.get("quantization_config"):
            self.problems.append("quantised drafters are not supported; use the plain checkpoint")
        if (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
            self.problems.append("drafters that take the last hidden state only (use_aux_hidden_state false) are not EAGLE 3")
        layer_ids = self._layer_ids()
        flags = {flag: self._flag(flag) for flag in FLAGS}
        if lacking or layer_ids is None:
            return None
        hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        mla = self._mla() if is_mla else None
        config = DrafterConfig(
            vocab_size=int(raw["vocab_size"]),
            draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
            hidden_size=hidden_size,
            target_hidden_size=int(raw.get("target_hidden_size") or hidden_size),
            intermediate_size=int(raw["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=num_heads if mla else int(raw.get("num_key_value_heads") or num_heads),
            head_dim=mla.qk_head_dim if mla else int(raw.get("head_dim") or hidden_size // num_heads),
            max_positions=int(raw["max_position_embeddings"]),
            aux_layer_ids=layer_ids,
            num_layers=int(raw.get("num_hidden_layers") or 1),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(raw),
            attention_bias=bool(raw.get("attention_bias", False)) and not mla,
            mlp_bias=bool(raw.get("mlp_bias", False)) and not mla,
            window=self._window(),
            qk_norm=self.architecture == QK_NORM_ARCHITECTURE,
            mla=mla,
            **flags,
        )
        self._check_sizes(config)
        return config

    def _mla(self) -> MLAConfig:
        raw = self.raw
        if biases := [key for key in ("attention_bias", "mlp_bias") if raw.get(key)]:
            self.problems.append(f"{' and '.join(biases)}: latent attention (MLA) drafters have no biases")
        if raw.get("rope_interleave") is False:
            self.problems.append("rope_interleave false is not supported: servers rotate adjacent pairs in MLA drafters")
        if problem := MLAConfig.rope_problem(RopeConfig.from_hf(raw)):
            self.problems.append(problem)
        sizes = {key: int(raw[key]) for key in MLA_SIZES}
        return MLAConfig(**sizes, q_lora_rank=int(raw["q_lora_rank"]) if raw.get("q_lora_rank") else None)

    def _flag(self, name: str) -> bool:
        """The flag's value at top level, where vLLM reads it, or inside `eagle_config`, where some trainers write it."""
        nested = (self.raw.get("eagle_config") or {}).get(name)
        top = self.raw.get(name)
        if top is not None and nested is not None and bool(top) != bool(nested):
            self.problems.append(f"{name} is {bool(top)} at top level and {bool(nested)} in eagle_config; keep one")
        return bool(nested if top is None else top)

    def _layer_ids(self) -> tuple[int, ...] | None:
        raw, target = self.raw, self.target
        top, nested = named_layers(raw)
        if top and nested and top != nested:
            self.problems.append(
                f"{LAYER_IDS} is {top} at top level and {nested} in eagle_config; "
                "keep the one it was trained with (0 = embeddings, i = after i layers)"
            )
        ids = tuple(top or nested)
        if not ids:
            if target is None:
                self.problems.append(
                    f"config.json does not name {LAYER_IDS}; its default depends on the target, so name the target too"
                )
                return None
            ids = default_aux_layers(target.num_layers)
        if list(ids) != sorted(set(ids)) or ids[0] < 0:
            self.problems.append(f"{LAYER_IDS} {list(ids)} must be ascending, unique and not negative")
        if target is not None and ids[-1] > target.num_layers:
            self.problems.append(f"{LAYER_IDS} {list(ids)} goes past the target's {target.num_layers} layers")
        count = raw.get("num_aux_hidden_states")
        if count is not None and int(count) != len(ids):
            self.problems.append(f"num_aux_hidden_states is {count} but {LAYER_IDS} has {len(ids)} entries")
        return ids

    def _window(self) -> int | None:
        window, kinds = self.raw.get("sliding_window"), self.raw.get("layer_types")
        if not window or self.raw.get("use_sliding_window") is False:
            return None
        if kinds and len({kind == "sliding_attention" for kind in kinds}) > 1:
            self.problems.append("draft layers that differ in their sliding window (layer_types) are not supported")
        return int(window) if not kinds or "sliding_attention" in kinds else None

    def _check_sizes(self, config: DrafterConfig) -> None:
        if config.draft_vocab_size > config.vocab_size:
            self.problems.append(f"draft_vocab_size {config.draft_vocab_size} > vocab_size {config.vocab_size}")
        if config.num_heads % config.num_kv_heads:
            self.problems.append(f"{config.num_heads} heads cannot share {config.num_kv_heads} key/value heads")
        target = self.target
        if target is None:
            return
        if config.target_hidden_size != target.hidden_size:
            self.problems.append(
                f"made for a target of hidden size {config.target_hidden_size}, this target has {target.hidden_size}: "
                "a drafter fits the one model it was trained for"
            )
        if config.vocab_size != target.vocab_size:
            self.problems.append(
                f"made for a vocabulary of {config.vocab_size}, this target has {target.vocab_size}: "
                "a drafter fits the one model it was trained for"
            )

    def check_sharing(self, config: DrafterConfig) -> None:
        lent = [name for name, own in (("embedding", config.own_embedding), ("head", config.own_head)) if not own]
        if lent and config.hidden_size != config.target_hidden_size:
            self.problems.append(
                f"hidden size {config.hidden_size} differs from the target's {config.target_hidden_size}, so the "
                f"target's {' and '.join(lent)} cannot be shared: the weights need embed_tokens and lm_head"
            )
        elif not config.own_head and config.draft_vocab_size != config.vocab_size:
            self.problems.append(
                f"no lm_head.weight although draft_vocab_size {config.draft_vocab_size} differs from vocab_size "
                f"{config.vocab_size}: the target's head cannot be shared"
            )


def config_to_hf(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the raw layout. Layer ids go to both places that are read; vLLM needs `num_aux_hidden_states` if not 3."""
    layer_ids = list(config.aux_layer_ids)
    return {
        "architectures": [_architecture(config)],
        "model_type": model_type(config),
        **{flag: getattr(config, flag) for flag in FLAGS},
        LAYER_IDS: layer_ids,
        "num_aux_hidden_states": len(layer_ids),
        "eagle_config": {
            LAYER_IDS: layer_ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **layer_config_to_hf(config),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _architecture(config: DrafterConfig) -> str:
    if config.mla is not None:
        return MLA_ARCHITECTURES[0]
    return QK_NORM_ARCHITECTURE if config.qk_norm else ARCHITECTURES[0]


def model_type(config: DrafterConfig) -> str:
    """The model_type whose configuration class has the layers' keys; vLLM recognises latent attention by it.

    Not deepseek_v3: vLLM mistakes a drafter of that type for DeepSeek's own MTP layers, and fails.
    """
    if config.mla is not None:
        return "deepseek_v2"
    return "qwen3" if config.qk_norm else "llama"


def layer_config_to_hf(config: DrafterConfig) -> dict[str, Any]:
    """The settings of the draft layers, under the keys of a Llama, Qwen3 or DeepSeek configuration."""
    layers: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_positions,
        **config.rope.to_hf(),
    }
    if config.window is not None:
        # vLLM applies the window only to layers that layer_types calls sliding
        layers |= {"sliding_window": config.window, "layer_types": ["sliding_attention"] * config.num_layers}
        layers |= {"use_sliding_window": True} if config.qk_norm else {}  # without it Qwen3's configuration drops the window
    if config.mla is not None:
        # some versions of transformers read head_dim as the size of the rotated part
        del layers["head_dim"]
        layers |= {**asdict(config.mla), "rope_interleave": True}
    return layers
