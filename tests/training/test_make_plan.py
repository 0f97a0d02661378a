"""The plan of `fledge make`: its text, its refusals and the recipe made from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.config import ModelConfig
from fledge.errors import UserError
from fledge.training import make_plan
from fledge.training.context import resolve
from fledge.training.distributed import DistributedContext
from fledge.training.make_plan import MakePlan, expected_acceptance
from fledge.training.recipe import Recipe, build_recipe
from tests.tiny import tiny_model_config
from tests.training.chat import ALWAYS_THINKING, TOOLS, chat_tokenizer

SMOLLM2 = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_embeddings=True)
QWEN_8B = ModelConfig("Qwen3ForCausalLM", 151_936, 4096, 12_288, 36, 32, 8, 128, 40_960)
LLAMA_70B = ModelConfig("LlamaForCausalLM", 128_256, 8192, 28_672, 80, 64, 8, 128, 131_072)
H200 = 140 << 30  # free bytes


def plan_for(tokenizer=None, prompts=None, **shape) -> MakePlan:
    return MakePlan.of(
        "some/model", tiny_model_config(**shape), tokenizer or chat_tokenizer(), torch.device("cpu"), 2.0, prompts
    )


@pytest.fixture
def on_h200(monkeypatch):
    """Builds plans for an H200's matrix product rate and the given free memory."""
    monkeypatch.setattr(make_plan, "product_rate", lambda device: 6.6e14)

    def plan(shape: ModelConfig, hours: float = 1.0, free_bytes: int = H200, **options) -> MakePlan:
        device = torch.device("cuda")
        return MakePlan.of("some/model", shape, chat_tokenizer(), device, hours, free_bytes=free_bytes, **options)

    return plan


def recipe_of(plan: MakePlan, num_tokens: float = 1e8) -> Recipe:
    seconds = plan.train_seconds(plan.answer_seconds)
    return build_recipe(plan.recipe(Path("out"), Path("train.jsonl"), Path("held.jsonl"), num_tokens, 2000, seconds))


def test_plan_describes_the_work():
    text = plan_for(chat_tokenizer(TOOLS), num_layers=28, vocab_size=151_936, hidden_size=1536, max_positions=32_768).describe()
    for words in ("half of them with thinking", "draft vocabulary 32,000 tokens", "window 2048", "target layers 2, 14, 25"):
        assert words in text
    assert "no thinking mode" in plan_for().describe()
    with pytest.raises(UserError, match="no chat template"):
        plan_for(chat_tokenizer(None))


def test_the_plan_becomes_a_recipe():
    plan = plan_for(num_layers=8)
    content = plan.recipe(Path("out"), Path("train.jsonl"), Path("held.jsonl"), 50_000, 100, plan.train_seconds(600.0))
    recipe = build_recipe(content)
    assert recipe.run.max_seconds == pytest.approx(7200 - 600 - 120)  # the last two minutes are reserved for the checks
    assert recipe.data.sequence_length == 128
    steps = 50_000 * recipe.run.epochs / (recipe.data.global_batch_size * recipe.data.sequence_length)
    assert steps > 250
    assert recipe.data.augmentation.active


def test_on_a_gpu_a_short_training_has_smaller_steps(on_h200):
    small, large = on_h200(SMOLLM2), on_h200(QWEN_8B)
    assert small.step_rows(1e8, 2048, 500) == 16
    assert large.step_rows(1e8, 2048, 2600) == 7
    assert large.step_rows(1e8, 2048, 10) == 4


def test_training_keeps_a_minimum_when_answers_take_too_long():
    plan = plan_for()
    assert plan.train_seconds(7100.0) == pytest.approx(0.25 * 7200)
    assert plan.train_seconds(plan.answer_seconds) > 1.5 * plan.answer_seconds


def test_a_file_of_prompts_is_answered_twice_before_the_target_writes_its_own(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "How are you?"}\n')

    def kinds(plan: MakePlan) -> list[tuple[bool, float]]:
        return [(part.self_written, part.temperature) for part in plan.answer_parts]

    assert kinds(plan_for(prompts=file)) == [(False, 0.0), (False, 0.8), (True, 0.0)]
    assert kinds(plan_for()) == [(True, 0.0), (True, 0.8)]
    for plan in (plan_for(), plan_for(prompts=file)):
        assert len({part.file for part in plan.answer_parts}) == len({part.seed for part in plan.answer_parts})


def test_expectations_grow_with_the_data():
    lengths = [expected_acceptance(tokens) for tokens in (1e5, 1e7, 2e7, 1e8, 1e10)]
    assert lengths == sorted(lengths)
    assert expected_acceptance(39e6) == pytest.approx(2.9)


@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_the_rows_of_a_step_can_be_shared_by_all_processes(on_h200, num_processes):
    """An 8B target with an hour had 7 rows per step, which 2, 4 or 8 GPUs cannot share: it stopped after the answers."""
    one = on_h200(QWEN_8B)
    many = on_h200(QWEN_8B, num_processes=num_processes, num_answering=num_processes)
    assert many.train_tokens_per_s == pytest.approx(num_processes * one.train_tokens_per_s)
    assert many.answer_tokens_per_s == pytest.approx(num_processes * one.answer_tokens_per_s)
    for hours in (0.3, 0.5, 1.0, 2.0):
        recipe = recipe_of(replace(many, hours=hours))
        recipe = replace(recipe, run=replace(recipe.run, device="cpu"), target=replace(recipe.target, backend="fledge"))
        resolved = resolve(recipe, DistributedContext(0, num_processes)).data
        assert resolved.micro_batch_size == recipe.data.micro_batch_size <= resolved.global_batch_size // num_processes


def test_estimates_match_measurements(on_h200):
    """Measured on one H200, SmolLM2-135M: 518,000 tokens/s, 5.6 to 6.3 GiB at 16 rows, 133,000 to 152,000 answer tokens/s."""
    plan = on_h200(SMOLLM2)
    assert plan.train_tokens_per_s == pytest.approx(518_000, rel=0.3)
    assert plan.answer_tokens_per_s == pytest.approx(142_000, rel=0.1)
    assert plan.batch(16, 2048).peak_bytes / 2**30 == pytest.approx(5.9, rel=0.1)
    assert on_h200(QWEN_8B).batch(4, 2048).peak_bytes / 2**30 == pytest.approx(31.8, rel=0.1)


def test_the_micro_batch_is_what_fits(on_h200):
    for free, expected in ((H200, (16, False)), (48 << 30, (8, False)), (30 << 30, (2, False)), (27 << 30, (1, True))):
        batch = on_h200(QWEN_8B, free_bytes=free).batch(16, 2048)
        assert (batch.micro_batch_size, batch.recompute) == expected, free >> 30
        assert batch.peak_bytes < 0.9 * free
    recipe = recipe_of(on_h200(QWEN_8B, 2.0, free_bytes=27 << 30))
    assert recipe.objective.recompute
    assert recipe.data.micro_batch_size < recipe.data.global_batch_size
    text = on_h200(QWEN_8B, free_bytes=27 << 30).describe()
    assert "recomputing activations" in text
    assert "of 27.0 GiB free: the target's weights 15.3 GiB" in text


def test_a_target_that_does_not_fit_is_refused_before_it_answers(on_h200):
    with pytest.raises(UserError, match=r"weights take 131.4 GiB.*140.0 GiB are free; .*--endpoint URL.*run.shard_target"):
        on_h200(LLAMA_70B)
    served = on_h200(LLAMA_70B, endpoint="http://host:8000/v1")
    assert served.batch(4, 2048).peak_bytes < H200
    assert "doctor" not in served.describe()
    with pytest.raises(UserError, match="use a GPU with more memory"):
        on_h200(LLAMA_70B, endpoint="http://host:8000/v1", free_bytes=24 << 30)


def test_twin_needs_time_and_memory(on_h200):
    alone, both = on_h200(QWEN_8B), on_h200(QWEN_8B, twin=True)
    assert both.batch(4, 2048).peak_bytes - alone.batch(4, 2048).peak_bytes == 18 * alone.work.drafter_parameters
    assert alone.train_tokens_per_s / 2 < both.train_tokens_per_s < alone.train_tokens_per_s
    assert recipe_of(both).run.patience is None  # all arms end together


def test_a_run_can_end_when_it_no_longer_improves(on_h200):
    """Six evaluations without an improvement end the run; there used to be only eight in all."""
    run = recipe_of(on_h200(SMOLLM2)).run
    assert 16 <= run.max_seconds / run.evaluate_seconds <= 20
    assert run.patience <= 7


def test_long_prompts_get_longer_rows_and_are_evaluated(tmp_path, on_h200):
    usual = on_h200(SMOLLM2)
    assert (usual.sequence_length, recipe_of(usual).evaluation.max_prompt_tokens) == (2048, 2048 - 128)
    file = tmp_path / "prompts.jsonl"
    words = "how are you? " * 1500  # 6,000 to 7,500 tokens with this tokenizer
    file.write_text("".join(json.dumps({"prompt": f"{number} {words if number % 10 else ''}"}) + "\n" for number in range(40)))
    plan = on_h200(SMOLLM2, prompts=file)
    assert plan.sequence_length == 8192
    assert recipe_of(plan).evaluation.max_prompt_tokens == 8192 - 128
    file.write_text("".join(json.dumps({"prompt": words * 8}) + "\n" for _ in range(3)))
    assert on_h200(replace(QWEN_8B), prompts=file).sequence_length == 16_384  # longer prompts are reported as too long
    assert on_h200(SMOLLM2, prompts=file).sequence_length == 8192  # the model's own limit


def test_plan_states_that_a_model_always_thinks():
    plan = plan_for(chat_tokenizer(ALWAYS_THINKING), max_positions=2048)
    assert "with thinking, which the template cannot switch off" in plan.describe()
    assert plan.max_answer_tokens > plan_for(max_positions=2048).max_answer_tokens
