"""Maps the decoder's parameters to the tensors in the files of each family, and converts between them.

The network fuses q, k, v and gate, up; most files store them separately. Other differences:

    experts        Mixtral has its own names; Qwen2-MoE's shared gate is the router's last output in the network
    Gemma 3        norms around attention and MLP, whose weights the file stores minus one; the scale of scores is folded into
                   the query norm
    Phi-3          fused like the network; only the first part of a head is rotated. Heads are reordered so that rotated pairs
                   lie half a head apart, as in the other families; the products of queries and keys do not change
    GLM-4          gate and up fused like the network; heads are reordered like Phi's, because adjacent dimensions are rotated
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.config import ModelConfig

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}
# Norms around attention and MLP: the network's name -> the file's.
NORMS = {
    "Gemma3ForCausalLM": {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    "Glm4ForCausalLM": {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"},
}
NORM = re.compile(r"norm\.weight$")


class Layout:
    """The mapping between a model's parameters and the tensors in its files."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def file_names(self, parameter: str) -> list[str]:
        """The tensors in the file that make up one parameter of the network."""
        config = self.config
        if self._is_fused(parameter):
            return [_prefixed(parameter)]
        if (norms := NORMS.get(config.architecture)) is not None:
            owner, _, rest = parameter.rpartition(".")
            head, _, norm = owner.rpartition(".")
            return file_names(f"{head}.{norms[norm]}.{rest}" if norm in norms else parameter)
        if config.moe is not None and config.moe.shared_intermediate_size and parameter.endswith("mlp.gate.weight"):
            return [_prefixed(parameter), _prefixed(parameter.replace("mlp.gate", "mlp.shared_expert_gate"))]
        names = file_names(parameter)
        if config.architecture == "MixtralForCausalLM":
            for ours, theirs in MIXTRAL.items():
                names = [name.replace(ours, theirs) for name in names]
        return names

    def join(self, parameter: str, parts: Sequence[Tensor]) -> Tensor:
        """Makes a parameter of the network from its tensors in the file."""
        value = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if self.config.unit_norms and NORM.search(parameter):
            value = 1 + value.float()
            return value * self.config.query_scale if parameter.endswith("q_norm.weight") else value
        order = self.head_order(parameter)
        return value if order is None else value[order.to(value.device)]

    def split(self, parameter: str, value: Tensor) -> Sequence[Tensor]:
        """The inverse of `join`; also works on meta tensors."""
        config = self.config
        order = self.head_order(parameter)
        if order is not None and not value.is_meta:
            value = value[order.argsort().to(value.device)]
        if config.unit_norms and NORM.search(parameter):
            value = (value / config.query_scale if parameter.endswith("q_norm.weight") else value) - 1
        if self._is_fused(parameter):
            return [value]
        if ".qkv_proj." in parameter:
            kv_rows = config.num_kv_heads * config.head_dim
            return value.split([config.num_heads * config.head_dim, kv_rows, kv_rows])
        if ".gate_up_proj." in parameter:
            return value.chunk(2)
        names = self.file_names(parameter)
        return [value] if len(names) == 1 else value.split([len(value) - 1, 1])

    def _is_fused(self, parameter: str) -> bool:
        return any(f".{name}." in parameter for name in self.config.fused_files)

    def is_exact(self, parameter: str) -> bool:
        """Whether the parameter stays in fp32 regardless of the network's type."""
        return self.config.unit_norms and NORM.search(parameter) is not None

    def head_order(self, parameter: str) -> Tensor | None:
        """For each row of the network's qkv_proj its row in the file; None: the same order.

        They differ if only a part of a head is rotated, or adjacent dimensions are rotated as pairs.
        """
        config = self.config
        if ".qkv_proj." not in parameter or (config.rotary_dim == config.head_dim and not config.interleaved):
            return None
        rotated, rest = torch.arange(config.rotary_dim), torch.arange(config.rotary_dim, config.head_dim)
        if config.interleaved:
            rotated = torch.cat([rotated[::2], rotated[1::2]])
        head = torch.cat([part for pair in zip(rotated.chunk(2), rest.chunk(2), strict=True) for part in pair])
        num_rotated = config.num_heads + config.num_kv_heads
        heads = torch.arange(num_rotated)[:, None] * config.head_dim + head
        values = torch.arange(num_rotated * config.head_dim, (num_rotated + config.num_kv_heads) * config.head_dim)
        return torch.cat([heads.flatten(), values])


def file_names(parameter: str) -> list[str]:
    """The tensors that make up a parameter, as Llama's files name them."""
    for fused, parts in FUSED.items():
        if f".{fused}." in parameter:
            return [_prefixed(parameter.replace(fused, part)) for part in parts]
    return [_prefixed(parameter)]


def _prefixed(parameter: str) -> str:
    return parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
