"""Every model family: speculation does not change answers, in the eager executor and in the captured one without graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fledge.config import MLAConfig
from fledge.engine.build import Speculation, build_engine
from fledge.models.decoder import causal_attend
from fledge.ops.cpu_ops import CpuOps
from fledge.sampling import SamplingParams
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import FAMILY_SETTINGS, tiny_decoder, tiny_drafter, tiny_drafter_config

NEW = [family for family in FAMILY_SETTINGS if family not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")]
MLA = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=20)
PARAMS = SamplingParams(max_tokens=40, temperature=0)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 128, (length,), generator=generator).tolist() for length in (1, 30, 7, 19)]


@pytest.mark.parametrize("family", NEW)
def test_plain_and_speculative_answers_are_equal(family):
    """With packed weights in C, where a row's values do not depend on other rows. Also equals the model without a KV cache."""
    config = replace(CPU, dtype="float16")
    engine = engine_with(tiny_decoder(1, family), Speculation("none"), config)
    assert isinstance(engine.executor.ops, CpuOps)
    plain = run(engine, prompts(), PARAMS)
    assert len({token for answer in plain for token in answer}) > 20
    decoder, tokens = engine.decoder, torch.tensor(prompts()[1] + plain[1][:-1])
    hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
    assert decoder.logits(hidden[len(prompts()[1]) - 1 :]).argmax(-1).tolist() == plain[1]
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts(), plain, strict=True)}
    drafters = (
        OracleSpeculator(answers, 5, reach=lambda length: length % 6),
        Speculation(tiny_drafter(tiny_drafter_config(decoder.config)), 3),
        Speculation(tiny_drafter(tiny_drafter_config(decoder.config, mla=MLA, fc_norm=True, norm_output=True)), 3),
    )
    for drafter in drafters:
        assert run(engine_with(decoder, drafter, config), prompts(), PARAMS) == plain


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", NEW)
def test_the_captured_executor_gives_the_same_answers(family, deterministic):
    config = replace(CPU, deterministic=deterministic)
    plain = run(engine_with(tiny_decoder(1, family), Speculation("none")), prompts(), PARAMS)
    drafter = tiny_drafter(tiny_drafter_config(tiny_decoder(1, family).config))
    for speculation in (Speculation("none"), Speculation(drafter, 3)):
        engine = build_engine(tiny_decoder(1, family), speculation.fixed_depth(), config, capture=False)
        assert run(engine, prompts(), PARAMS) == plain


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"])
def test_quantised_weights(family, bits):
    config = replace(CPU, dtype="float16", quantization=bits)
    engine = engine_with(tiny_decoder(1, family), Speculation("none"), config)
    assert isinstance(engine.executor.ops, CpuOps)
    plain = run(engine, prompts(), PARAMS)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts(), plain, strict=True)}
    oracle = OracleSpeculator(answers, 5, reach=lambda length: length % 6)
    assert run(engine_with(engine.decoder, oracle, config), prompts(), PARAMS) == plain
