"""The target: Llama, Mistral, Qwen2, Qwen3 and SmolLM in one network; what differs comes from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fledge.config import ModelConfig
from fledge.errors import ModelError
from fledge.models.layers import MLP, Attend, Attention, RMSNorm, Rotary


class DecoderOutput(NamedTuple):
    hidden_ND: Tensor  # after the final norm: what the head reads
    taps: list[Tensor]  # one [N, D] per tapped layer, in the order asked for


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.self_attn = Attention(
            layer,
            config.hidden_size,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            window=config.windows[layer] if config.windows else None,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.head_dim, config.max_positions, config.rope)

    def forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        taps: Sequence[int] = (),
        highest_position: int | None = None,
    ) -> DecoderOutput:
        """`taps`: layer counts i; tap i is the residual stream after i layers (0: the embeddings)."""
        captured: dict[int, Tensor] = {}
        x = self.embed(tokens_N)
        cos, sin = self.rotary(positions_N, highest_position)
        for index, layer in enumerate(self.layers):
            if index in taps:
                captured[index] = x
            x = layer(x, cos, sin, attend)
        if len(self.layers) in taps:
            captured[len(self.layers)] = x
        return DecoderOutput(self.norm(x), [captured[i] for i in taps])

    def embed(self, tokens: Tensor) -> Tensor:
        # Activations follow the norms' type: packed CPU weights are fp16 while everything between them is fp32.
        return self.embed_tokens(tokens).to(self.norm.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def check_taps(self, taps: Sequence[int]) -> None:
        bad = [i for i in taps if not 0 <= i <= len(self.layers)]
        if bad:
            raise ModelError(f"the target has {len(self.layers)} layers; it cannot be tapped after layer(s) {bad}")


def causal_attend(lengths: Sequence[int] | None = None) -> Attend:
    """Attention without a cache over whole sequences lying one after the other (`lengths`; None: a single one)."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        outputs = []
        for q_s, k_s, v_s in zip(*(x.split(lengths or [x.shape[0]]) for x in (q, k, v)), strict=True):
            mask = None
            if window is not None:
                ago = torch.arange(len(q_s), device=q.device)
                ago = ago[:, None] - ago[None, :]
                mask = (ago >= 0) & (ago < window)
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    q_s.transpose(0, 1)[None],
                    k_s.transpose(0, 1)[None],
                    v_s.transpose(0, 1)[None],
                    attn_mask=mask,
                    is_causal=mask is None,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            )
        return torch.cat(outputs)

    return attend
