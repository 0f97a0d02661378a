"""Drafters with latent attention on real vLLM, for a DeepSeek target: every draft is what our network computes.

Fledge does not serve such targets, so transformers computes the states, and our drafter runs over the whole text for every
draft. On a CPU, vLLM 0.32 does not support a target with other attention (no common block size for the two caches), nor
latent attention with default rope (its rotation reads a strided view wrongly, in targets too), so both use YaRN here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from fledge.checkpoints.eagle3 import save_drafter
from fledge.config import MLAConfig, RopeConfig
from fledge.models.decoder import causal_attend
from fledge.models.drafter import EagleDrafter
from tests.interop.runs import run_vllm
from tests.interop.tiny_models import save_tokenizer
from tests.tiny import tiny_drafter, tiny_drafter_config

pytestmark = pytest.mark.vllm
DEPTH = 4
# vLLM's CPU kernels require latent states of 512 + 64
SIZES = MLAConfig(kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=24, q_lora_rank=48)
YARN = RopeConfig(theta=1e3, kind="yarn", factor=4.0, original_max_positions=32, mscale=1.0, mscale_all_dim=0.7)
DRAFTERS = {
    "eagle 3.1": {"fc_norm": True, "norm_output": True, "mla": SIZES, "rope": YARN, "draft_vocab_size": 96},
    "eagle 3": {"mla": SIZES, "rope": replace(YARN, mscale_all_dim=1.0)},
}


@pytest.fixture(scope="module")
def target() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        first_k_dense_replace=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=24,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) * (0.3 if weight.dim() > 1 else 0.1) + (weight.dim() == 1))
    return model


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_every_draft_equals_ours(tmp_path, target, name):
    target.save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target", target.config.vocab_size)
    sizes = {"vocab_size": 128, "hidden_size": 64, "target_hidden_size": 64, "num_heads": 4, "max_positions": 128}
    config = tiny_drafter_config(None, **{**sizes, "draft_vocab_size": 128, "aux_layer_ids": (1, 2, 4), **DRAFTERS[name]})
    drafter = tiny_drafter(config)
    generator = torch.Generator().manual_seed(9)
    job = {
        "target": str(tmp_path / "target"),
        "drafter": str(save_drafter(drafter, tmp_path / "drafter")),
        "prompts": [torch.randint(5, 128, (5 + 9 * i,), generator=generator).tolist() for i in range(4)],
        "max_tokens": 10,
        "depth": DEPTH,
        "max_model_len": 128,
        "ignore_eos": True,
    }
    result = run_vllm(tmp_path, job)
    drafter.share(target.model.embed_tokens, target.lm_head)
    checked = 0
    for prompt, answer, proposed in zip(job["prompts"], result["token_ids"], result["proposed"], strict=True):
        length = 1  # of the answer so far, when the next draft is made
        for draft in proposed:
            if length >= len(answer):
                break
            assert draft == drafted(target, drafter, [*prompt, *answer[:length]])
            agreed = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, answer[length:], strict=False))
            length += 1 + sum(1 for _ in agreed)
            checked += 1
    assert checked > 20


def drafted(target: DeepseekV3ForCausalLM, drafter: EagleDrafter, tokens: list[int]) -> list[int]:
    """The next draft: one forward pass over the pairs (x1, g0), (x2, g1), … of the whole text per drafted token."""
    states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    state, paired = drafter.fuse([states[i][0] for i in drafter.config.aux_layer_ids]), list(tokens[1:])
    for _ in range(DEPTH):
        hidden, feedback = drafter(torch.tensor(paired), state, torch.arange(len(paired)), causal_attend())
        paired.append(int(drafter.target_ids(drafter.logits(hidden[-1]).argmax())))
        state = torch.cat([state, feedback[-1:]])
    return paired[-DEPTH:]
