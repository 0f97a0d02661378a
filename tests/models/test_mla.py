"""Latent attention equals plain arithmetic, one token at a time, and DeepSeek's attention in transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fledge.checkpoints.eagle3 import save_drafter
from fledge.config import MLAConfig, RopeConfig
from fledge.models.layers import Rotary
from fledge.models.mla import LatentAttention
from fledge.ops.torch_ops import AttendOps
from tests.models.test_drafter import FLAGS, NUM_PROMPT, KeepingAttend, PlainDrafter, network_drafts, plain_drafts
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

SIZES = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)
# A short original length and a large factor, so that every frequency is in another part of the ramp.
YARN = RopeConfig(theta=100.0, kind="yarn", factor=8.0, original_max_positions=40, beta_fast=4.0, beta_slow=1.0)


class PlainLatentDrafter(PlainDrafter):
    """The formulas of DeepSeek-V2's attention on a checkpoint's tensors."""

    def rotated(self, head: Tensor, position: int) -> Tensor:
        """Rotates the pairs of neighbours (0, 1), (2, 3), …"""
        angles, magnitude = self.angles(len(head), position)
        result = torch.empty_like(head)
        for i, angle in enumerate(angles):
            a, b = head[2 * i], head[2 * i + 1]
            result[2 * i] = magnitude * (a * math.cos(angle) - b * math.sin(angle))
            result[2 * i + 1] = magnitude * (b * math.cos(angle) + a * math.sin(angle))
        return result

    def angles(self, size: int, position: int) -> tuple[list[float], float]:
        rope: RopeConfig = self.settings["rope"]
        plain = [rope.theta ** (-2 * i / size) for i in range(size // 2)]
        if rope.kind == "default":
            return [position * frequency for frequency in plain], 1.0
        low, high = (
            size * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        shares = [min(max((i - low) / (high - low), 0), 1) for i in range(size // 2)]
        stretched = [f * (1 - share) + f / rope.factor * share for f, share in zip(plain, shares, strict=True)]
        return [position * f for f in stretched], self.magnitude(rope.mscale or 1.0) / self.magnitude(rope.mscale_all_dim or 0)

    def magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.settings["rope"].factor) + 1

    def attention(self, layer: int, name: str, x: Tensor, position: int) -> Tensor:
        settings, sizes, num_heads = self.settings, self.settings["mla"], self.settings["num_heads"]
        nope, rope_size = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim

        def times(part: str, y: Tensor) -> Tensor:
            return self.weights[f"{name}.self_attn.{part}.weight"] @ y

        if sizes.q_lora_rank:
            queries = times("q_b_proj", self.norm(times("q_a_proj", x), f"{name}.self_attn.q_a_layernorm"))
        else:
            queries = times("q_proj", x)
        latent, shared_key = times("kv_a_proj_with_mqa", x).split((sizes.kv_lora_rank, rope_size))
        shared_key = self.rotated(shared_key, position)
        expanded = times("kv_b_proj", self.norm(latent, f"{name}.self_attn.kv_a_layernorm"))
        self.kept[layer].append(([part[:nope] for part in expanded.chunk(num_heads)], shared_key, expanded.chunk(num_heads)))
        visible = self.kept[layer][-settings["window"] :] if settings["window"] else self.kept[layer]
        scale = (nope + rope_size) ** -0.5
        if settings["rope"].kind == "yarn":
            scale *= self.magnitude(settings["rope"].mscale_all_dim or 0) ** 2
        outputs = []
        for head, query in enumerate(queries.chunk(num_heads)):
            turned = self.rotated(query[nope:], position)
            scores = torch.stack([(query[:nope] @ keys[head] + turned @ shared) * scale for keys, shared, _ in visible])
            shares = (scores - scores.max()).exp()
            shares = shares / shares.sum()
            outputs.append(sum(share * both[head][nope:] for share, (_, _, both) in zip(shares, visible, strict=True)))
        return times("o_proj", torch.cat(outputs))


EAGLE31 = {"fc_norm": True, "norm_output": True}
VARIANTS = {
    "eagle 3": {},
    "eagle 3.1": EAGLE31,
    "latent queries": EAGLE31 | {"mla": replace(SIZES, q_lora_rank=20)},
    "values as wide as keys": {"mla": replace(SIZES, v_head_dim=14)},
    "narrow values": {"mla": replace(SIZES, v_head_dim=3, q_lora_rank=7)},
    "yarn": EAGLE31 | {"rope": YARN},
    "yarn with both scales": {"rope": replace(YARN, mscale=1.0, mscale_all_dim=0.6), "mla": replace(SIZES, q_lora_rank=20)},
    "yarn with equal scales": {"rope": replace(YARN, mscale=1.0, mscale_all_dim=1.0)},
    "two layers": EAGLE31 | {"num_layers": 2},
    "window": {"window": 5},
    "norm_before_residual, draft vocabulary": {"norm_before_residual": True, "draft_vocab_size": 48},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_states_and_logits_equal_the_formulas(tmp_path, settings):
    target = tiny_decoder().double()
    drafter = tiny_drafter(tiny_drafter_config(target.config, **{"mla": SIZES} | settings)).double()
    config = drafter.config
    reference = PlainLatentDrafter(
        load_file(save_drafter(drafter, tmp_path / "drafter") / "model.safetensors"),
        {
            "eps": config.rms_norm_eps,
            "rope": config.rope,
            "mla": config.mla,
            "num_heads": config.num_heads,
            "num_layers": config.num_layers,
            "window": config.window,
            **{flag: settings.get(flag, False) for flag in FLAGS},
        },
        target.embed_tokens.weight,
        target.lm_head.weight,
    )
    drafter.share(target.embed_tokens, target.lm_head)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocab_size, (NUM_PROMPT + 1,), generator=generator)
    taps = [torch.randn(NUM_PROMPT, 32, generator=generator, dtype=torch.float64) * (i + 1) for i in range(3)]
    expected, actual = plain_drafts(reference, tokens, taps), network_drafts(drafter, tokens, taps)
    for name in ("logits", "hidden", "feedback"):
        torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert actual["drafts"] == expected["drafts"]


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@torch.no_grad()
def test_one_layer_equals_transformers(q_lora_rank):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    rope = replace(YARN, mscale=1.0, mscale_all_dim=0.8)
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40, "beta_fast": 4.0, "beta_slow": 1.0}
    theirs_config = DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=10,
        max_position_embeddings=320,
        rope_parameters={**scaling, "rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        attn_implementation="eager",
    )
    theirs = DeepseekV3Attention(theirs_config, 0).double().eval()
    ours = LatentAttention(0, 32, 32, 4, replace(SIZES, q_lora_rank=q_lora_rank), rope, 1e-6).double()
    state = {name: torch.randn_like(weight) * 0.3 for name, weight in theirs.state_dict().items()}
    theirs.load_state_dict(state)
    queries = state.pop("q_a_proj.weight" if q_lora_rank else "q_proj.weight")
    ours.load_state_dict(state | {"qkv_a_proj.weight": torch.cat([queries, state.pop("kv_a_proj_with_mqa.weight")])})
    x, positions = torch.randn(9, 32, dtype=torch.float64), torch.arange(60, 69)
    embeddings = DeepseekV3RotaryEmbedding(theirs_config)(x[None].float(), positions[None])
    causal = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected, _ = theirs(x[None], tuple(part.double() for part in embeddings), causal)
    cos, sin = Rotary(6, 320, rope)(positions)
    found = ours.o_proj(ours(x, None, AttendOps(KeepingAttend(), (cos.double(), sin.double()))))
    torch.testing.assert_close(found, expected[0], atol=1e-6, rtol=1e-5)
