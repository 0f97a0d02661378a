"""The target: Llama, Mistral, Qwen2, Qwen3 and SmolLM in one network; what differs comes from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fledge.config import ModelConfig
from fledge.errors import ModelError
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import Attend
from fledge.kernels.attention.paged import causal_attend as causal_attend
from fledge.models.layers import MLP, Attention, Layer, RMSNorm, Rotary, module_list
from fledge.ops.base import Ops
from fledge.ops.torch_ops import AttendOps

# The layers that let their attention start only after everything before them (a PDL barrier). One is enough: what attention
# reads early (the settled keys, where sequences stand) was complete before the first. Benchmarks change it.
HOLDING_LAYERS = 1


class DecoderOutput(NamedTuple):
    hidden_ND: Tensor  # after the final norm: what the head reads
    taps: Sequence[Tensor]  # one [N, D] per tapped layer, in the order asked for


class DecoderLayer(Layer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(layer)
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


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = module_list(DecoderLayer(config, layer) for layer in range(config.num_layers))
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
        """In plain PyTorch, with the caller's own attention.

        `taps`: layer counts i; tap i is the residual stream after i layers (0: the embeddings).
        """
        ops = AttendOps(attend, self.rotary(positions_N, highest_position))
        x, aux = self.run(self.embed(tokens_N), None, ops, taps)
        return DecoderOutput(ops.norm(self.norm, x), aux)

    def run(
        self, x_ND: Tensor, meta: AttentionMetadata | None, ops: Ops, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The layers, from embeddings (which may be overwritten) to the states before the final norm, and the taps."""
        return ops.layers(self.layers, x_ND, meta, taps, num_holding=HOLDING_LAYERS)

    def embed(self, tokens: Tensor) -> Tensor:
        # Activations follow the norms' type: packed CPU weights are fp16 while everything between them is fp32.
        return self.embed_tokens(tokens).to(self.norm.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def check_taps(self, taps: Sequence[int]) -> None:
        bad = [i for i in taps if not 0 <= i <= len(self.layers)]
        if bad:
            raise ModelError(f"the target has {len(self.layers)} layers; it cannot be tapped after layer(s) {bad}")
