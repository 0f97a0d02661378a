"""Recipes: reading, overrides and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import fledge
from fledge.config import DrafterConfig, MLAConfig, RopeConfig
from fledge.errors import UserError
from fledge.training.drafter import drafter_config
from fledge.training.recipe import RecipeError, build_recipe, describe_keys, load_recipe
from tests.tiny import tiny_model_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SHIPPED = Path(fledge.__file__).parent / "drafters" / "smollm2-135m-eagle3.1"
SMALL = {"output": "out", "target": {"model": "toy"}, "data": {"train": "toy"}, "run": {"steps": 3}}


def write(tmp_path: Path, content: dict) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_survive_a_round_trip(path, tmp_path):
    recipe = load_recipe(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe.to_yaml())
    assert load_recipe(copy) == recipe


def test_recipes_are_shipped():
    assert {path.stem for path in RECIPES} >= {
        "tiny",
        "tiny-mla",
        "smollm2-135m-eagle3",
        "smollm2-135m-eagle3.1",
        "qwen3-8b-eagle3.1",
    }


@pytest.mark.parametrize("stage", ["", "-continued"])
def test_the_two_smollm2_recipes_differ_in_version_output_and_learning_rate_alone(stage):
    ours, twin = (load_recipe(RECIPES[0].parent / f"smollm2-135m-eagle{v}{stage}.yaml").to_dict() for v in ("3.1", "3"))
    for recipe in (ours, twin):
        del recipe["output"], recipe["drafter"]["version"], recipe["drafter"]["init_from"]
        del recipe["optimizer"]["learning_rate"]
    assert ours == twin


def test_smollm2_recipes_match_the_shipped_drafters_provenance():
    """Compares with the drafter's provenance. Not compared: the time limit, and init_from, whose folder has moved."""
    folder = RECIPES[0].parent
    record = json.loads((SHIPPED / "provenance.json").read_text())
    first, second = (load_recipe(folder / f"smollm2-135m-eagle3.1{stage}.yaml") for stage in ("", "-continued"))
    said, ran = json.loads(json.dumps(second.to_dict())), record["recipe"]
    for recipe in (said, ran):
        recipe["drafter"].pop("init_from")
    # Keys renamed since then. Long samples were split into pieces then; that setting no longer exists.
    ran["optimizer"]["max_grad_norm"] = ran["optimizer"].pop("clip")
    ran["objective"]["outside_vocabulary"] = "renormalise" if ran["objective"].pop("renormalise") else "mask"
    ran["data"]["micro_batch_size"] = ran["data"].pop("batch_rows")
    for section in ("drafter", "objective", "optimizer"):
        assert said[section] == ran[section]
    for key in ("sequence_length", "micro_batch_size", "remove_loops", "held_out_samples", "augmentation"):
        assert said["data"][key] == ran["data"][key]
    assert [Path(file).name for file in second.data.train] == [Path(f).name for f in ran["data"]["train"]]
    assert [Path(file).name for file in second.data.train] == record["data"]["files"]
    assert second.run.steps == record["step"]

    before = record["first_stage"]
    settings = before["settings"]
    assert first.run.steps == before["steps"]
    assert first.drafter.window is None
    assert str(first.drafter.draft_vocab_size) == settings["draft_vocab"]
    assert (str(first.objective.ttt_steps), first.objective.loss) == (settings["ttt"], settings["loss"])
    assert (str(first.data.sequence_length), str(first.data.micro_batch_size)) == (settings["sequence"], settings["rows"])
    assert len(first.data.train) == len([kind for kind in before["samples"] if kind in ("greedy", "sampled")])
    for version, rate in before["learning_rates"].items():
        assert load_recipe(folder / f"smollm2-135m-eagle{version}.yaml").optimizer.learning_rate == rate


def test_overrides_are_dotted_yaml(tmp_path):
    recipe = load_recipe(
        write(tmp_path, SMALL),
        ["optimizer.learning_rate=5e-4", "drafter.aux_layers=[1, 3]", "drafter.window=null", "run.compile=no", "seed=7"],
    )
    assert recipe.optimizer.learning_rate == 5e-4
    assert recipe.drafter.aux_layers == (1, 3)
    assert recipe.drafter.window is None
    assert recipe.run.compile == "no"
    assert recipe.seed == 7
    assert recipe.data.train == ("toy",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rat=1", "unknown key optimizer.learning_rat; did you mean optimizer.learning_rate"),
        ("optimiser.kind=adamw", "unknown key optimiser; did you mean optimizer"),
        ("zzz=1", "unknown key zzz; known: output"),
        ("run.steps=many", "run.steps must be a valid integer, not 'many'"),
        ("run.steps=0", "run.steps must be greater than or equal to 1, not 0"),
        ("run.steps=true", "run.steps must be a valid integer, not True"),
        ("objective.loss=mse", "objective.loss must be 'kl', 'lk' or 'mix', not 'mse'"),
        ("drafter.version=4", "drafter.version must be '3' or '3.1', not '4'"),
        ("drafter.window=4", "drafter.window must be larger"),
        ("drafter.attention=linear", "drafter.attention must be 'gqa' or 'mla', not 'linear'"),
        ("drafter.mla.kv_lora_rank=64", "it also needs drafter.attention: mla"),
        ("drafter.mla.kv_lora_rang=64", "unknown key drafter.mla.kv_lora_rang; did you mean drafter.mla.kv_lora_rank"),
        ("drafter={attention: mla, qk_norm: true}", "drafter.qk_norm goes with drafter.attention: gqa"),
        ("evaluation.select_depth=4", "select_depth 4 is not among"),
        (
            "data.augmentation.template_probability=2",
            "data.augmentation.template_probability must be less than or equal to 1, not 2",
        ),
        ("run.steps=null", "run has no end: set steps, epochs or max_seconds"),
        ("data.train=[]", "data.train has no files"),
        ("run", "key=value"),
        ("seed.deeper=1", "seed.deeper"),
        ("data=null", "data: expected keys and values"),
    ],
)
def test_mistakes_are_refused_by_name(tmp_path, override, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        load_recipe(write(tmp_path, SMALL | {"seed": 1}), [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=-1", "seed must be greater than or equal to 0, not -1"),
        ("target.endpoint_requests=0", "target.endpoint_requests must be greater than or equal to 1, not 0"),
        ("drafter.intermediate_size=-4", "drafter.intermediate_size must be greater than or equal to 1, not -4"),
        ("drafter.draft_vocab_size=0", "drafter.draft_vocab_size must be greater than or equal to 1, not 0"),
        ("drafter.draft_vocab_size=-5", "drafter.draft_vocab_size must be greater than or equal to 1, not -5"),
        ("drafter.aux_layers=[]", "drafter.aux_layers is empty"),
        ("drafter.aux_layers=[-1, 2]", "drafter.aux_layers must be greater than or equal to 0, not -1"),
        ("drafter={attention: mla, mla: {v_head_dim: 0}}", "drafter.mla.v_head_dim must be greater than or equal to 1, not 0"),
        ("data.held_out_samples=0", "data.held_out_samples must be greater than or equal to 1, not 0"),
        ("data.sequence_length=1", "data.sequence_length must be greater than or equal to 2, not 1"),
        ("data.micro_batch_size=0", "data.micro_batch_size must be greater than or equal to 1, not 0"),
        ("data.position_offset_max=-1", "data.position_offset_max must be greater than or equal to 0, not -1"),
        ("data.limit=0", "data.limit must be greater than or equal to 1, not 0"),
        ("objective.ttt_steps=0", "objective.ttt_steps must be greater than or equal to 1, not 0"),
        ("objective.decay=-1", "objective.decay must be greater than 0, not -1"),
        ("objective.decay=0", "objective.decay must be greater than 0, not 0"),
        ("objective.lk_weight=3", "objective.lk_weight must be less than or equal to 1, not 3"),
        ("objective.chunk_rows=0", "objective.chunk_rows must be greater than or equal to 1, not 0"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate must be greater than 0, not -1"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate must be a finite number, not nan"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate must be a finite number, not inf"),
        ("optimizer.muon_learning_rate=0", "optimizer.muon_learning_rate must be greater than 0, not 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: missing"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas must be less than 1, not 1"),
        ("optimizer.weight_decay=-0.1", "optimizer.weight_decay must be greater than or equal to 0, not -0.1"),
        ("optimizer.max_grad_norm=-1", "optimizer.max_grad_norm must be greater than 0, not -1"),
        ("optimizer.warmup=1", "optimizer.warmup must be less than 1, not 1"),
        ("optimizer.decay=0", "optimizer.decay must be greater than 0, not 0"),
        ("optimizer.floor=2", "optimizer.floor must be less than or equal to 1, not 2"),
        ("run.epochs=-1", "run.epochs must be greater than 0, not -1"),
        ("run.max_seconds=0", "run.max_seconds must be greater than 0, not 0"),
        ("run.patience=0", "run.patience must be greater than or equal to 1, not 0"),
        ("run.device=foo", "run.device: 'foo' must be auto, cpu, cuda"),
        ("evaluation.depths=[0, 5]", "evaluation.depths must be greater than or equal to 1, not 0"),
        ("evaluation.max_prompt_tokens=1", "evaluation.max_prompt_tokens must be greater than or equal to 2, not 1"),
        ("evaluation.sink_column=-1", "evaluation.sink_column must be greater than or equal to 0, not -1"),
        ("evaluation.sink_column=5000", "evaluation.sink_column 5000 must be less than evaluation.max_prompt_tokens"),
    ],
)
def test_impossible_numbers_are_refused_with_what_is_allowed(tmp_path, override, message):
    with pytest.raises(RecipeError, match="^" + re.escape(message)):
        load_recipe(write(tmp_path, SMALL), [override])


@pytest.mark.parametrize(
    "override",
    [
        "drafter={attention: mla, mla: {q_lora_rank: 0}}",
        "drafter.draft_vocab_size=null",
        "objective.decay=1",
        "objective.lk_weight=0",
        "optimizer.max_grad_norm=null",
        "optimizer.betas=[0, 0.999]",
        "optimizer.warmup=0",
        "optimizer.decay=1",
        "run.device=cuda:1",
        "evaluation.sink_column=1023",
    ],
)
def test_boundary_values_are_allowed(tmp_path, override):
    load_recipe(write(tmp_path, SMALL), [override])


def test_numbers_are_checked_in_direct_construction(tmp_path):
    recipe = load_recipe(write(tmp_path, SMALL))
    with pytest.raises(ValueError, match=r"greater than or equal to 1"):
        replace(recipe, run=replace(recipe.run, patience=0))


def latent_drafter(target, **drafter) -> DrafterConfig:
    settings = {"attention": "mla", "aux_layers": [1, 2, 3], "draft_vocab_size": None, **drafter}
    return drafter_config(build_recipe({**SMALL, "drafter": settings}).drafter, target)


def test_sizes_of_latent_attention():
    """Defaults are DeepSeek's; the recipe's sizes and those of a target with latent attention replace them."""
    target = tiny_model_config(head_dim=8)
    config = latent_drafter(target)
    assert config.mla == MLAConfig(kv_lora_rank=512, qk_nope_head_dim=8, qk_rope_head_dim=64, v_head_dim=8, q_lora_rank=32)
    assert (config.num_kv_heads, config.head_dim) == (4, 72)
    assert latent_drafter(target, mla={"q_lora_rank": 0}).mla.q_lora_rank is None
    asked = {"kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5}
    assert latent_drafter(target, mla=asked).mla == MLAConfig(**asked)
    own = SimpleNamespace(**vars(target), mla=MLAConfig(**asked))
    assert latent_drafter(own, mla={"v_head_dim": 7}).mla == MLAConfig(**asked | {"v_head_dim": 7})
    with pytest.raises(UserError, match="qk_rope_head_dim 3 is odd"):
        latent_drafter(target, mla={"qk_rope_head_dim": 3})


def test_latent_attention_gets_rope_that_all_servers_support():
    llama3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=64)
    yarn = RopeConfig(theta=5e4, kind="yarn", factor=8.0, original_max_positions=64)
    assert latent_drafter(tiny_model_config(rope=llama3)).rope == RopeConfig(theta=5e5)
    assert latent_drafter(tiny_model_config(rope=yarn)).rope == yarn


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(RecipeError, match=r"target\.model: missing; unknown key data\.trian.*; run\.steps must be"):
        build_recipe({**SMALL, "target": {}, "data": {"train": "toy", "trian": 1}, "run": {"steps": 0}})


def test_values_that_are_possible_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"data\.long must be 'truncate' or 'drop', not 'chunk'"):
        load_recipe(write(tmp_path, SMALL), ["data.long=chunk"])


def test_every_key_is_described_and_its_default_is_the_real_one():
    text = describe_keys()
    described = yaml.safe_load(text.replace("(required)", "toy"))
    described["run"]["steps"] = 1
    recipe = build_recipe(described)
    assert recipe == build_recipe({"output": "toy", "target": {"model": "toy"}, "data": {"train": "toy"}, "run": {"steps": 1}})
    for line in text.splitlines():
        _, hash_sign, meaning = line.partition("  # ")
        assert hash_sign, line
        assert meaning not in ("", "None"), line


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_commands_for_several_gpus_train_as_the_recipe_says(path):
    """global_batch_size is set explicitly, so that torchrun needs no further setting."""
    if "torchrun" in path.read_text():
        assert load_recipe(path).data.global_batch_size is not None


def test_missing_keys_are_named():
    with pytest.raises(RecipeError, match=r"target\.model: missing"):
        build_recipe({**SMALL, "target": {}})


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(RecipeError, match="there is no such recipe"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(RecipeError, match="not YAML"):
        load_recipe(tmp_path / "bad.yaml")
