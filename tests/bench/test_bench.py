"""The benchmark on a tiny model: counts, comparisons and output files."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from fledge.bench.baselines import run_baseline
from fledge.bench.datasets import Item
from fledge.bench.matrix import Bench, Case, baselines, drafter_names, run_bench
from fledge.bench.report import skipped_lines, table
from fledge.bench.runs import Run, Turn, acceptance, identical, run_items, step_bytes
from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.engine.config import EngineConfig
from fledge.errors import UserError
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from fledge.speculation.stats import AcceptanceStats
from tests.serving.model_folder import make_model
from tests.tiny import tiny_drafter, tiny_drafter_config

ITEMS = [Item("a", "one", ("the cat", "and the dog")), Item("b", "two", ("the fox",)), Item("b", "two", ("a hat",))]
PARAMS = SamplingParams(max_tokens=10, temperature=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    model = make_model(root / "model")
    save_drafter(
        tiny_drafter(tiny_drafter_config(load_decoder(model).config, norm_output=True, fc_norm=True)), root / "drafter"
    )
    return root


@pytest.fixture(scope="module")
def bench(folders):
    return Bench(str(folders / "model"), EngineConfig(dtype="float32", max_num_seqs=4), ITEMS, PARAMS.max_tokens)


def turn(tokens, accepted, steps, category="c"):
    stats = AcceptanceStats()
    for _ in range(steps):
        stats.add_step(2, 2, accepted, accepted + 1)
    return Turn("i", category, 1, 3, tokens, 1.0, 3.0, stats)


def test_speeds_follow_their_definitions():
    run = Run([turn(list(range(21)), 1, 10), turn(list(range(11)), 2, 5)], seconds=4.0, engine_steps=9, bytes_read=8.0)
    assert run.tokens_per_second == 32 / 4
    assert run.tokens_per_second_per_user == 30 / 4  # 20 and 10 tokens after the first, two seconds each
    assert run.turns[0].tokens_per_second == 10
    assert run.bytes_per_second == 2
    assert Run([turn(list(range(21)), 1, 10)], 1, 1, 1).tokens_per_pass == 2
    assert Run([turn(list(range(21)), 1, 5)], 1, 1, 1).tokens_per_pass == 20 / 15  # five drafted passes, ten plain ones


def test_acceptance_by_every_definition():
    turns = [turn([1], 1, 30, "x"), turn([2], 2, 10, "y")]
    figures = acceptance(turns, is_looping=lambda tokens: tokens == [2])
    assert figures["acceptance_length_micro"] == pytest.approx(1 + 50 / 40)
    assert figures["acceptance_length_macro"] == pytest.approx((2 + 3) / 2)
    assert figures["by_position"] == pytest.approx([1.0, 0.25])
    assert figures["looping_answers"] == 1
    assert figures["not_looping"]["acceptance_length_micro"] == 2
    assert figures["by_category"]["y"]["acceptance_length_micro"] == 3


def test_identical_reports_the_first_difference():
    plain, other = (Run([turn([1, 2, 3], 1, 1), turn(tokens, 1, 1)], 1, 1, 1) for tokens in ([4, 5, 6], [4, 5, 7]))
    assert identical(plain, plain) == {"same": 2, "of": 2, "first_difference": None}
    assert identical(plain, other) == {"same": 1, "of": 2, "first_difference": {"item": "i", "turn": 1, "token": 2}}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_conversations_continue_with_generated_answers(bench, concurrency):
    asked = []

    def encode(messages):
        asked.append([dict(message) for message in messages])
        return bench.encode(messages)

    run = run_items(bench.plain, ITEMS, encode, PARAMS, concurrency, speculate=False)
    assert [(one.item, one.number) for one in run.turns] == [("a", 1), ("a", 2), ("b", 1), ("b", 1)]
    assert all(0 < len(one.tokens) <= 10 for one in run.turns)
    second = next(messages for messages in asked if len(messages) == 3)
    assert second[1]["content"] == bench.tokenizer.decode([t for t in run.turns[0].tokens if t != 2])
    assert second[2]["content"] == "and the dog"
    assert not bench.plain.has_unfinished()


def test_bytes_are_those_of_the_weights(bench, folders):
    size = 4  # fp32
    config = bench.decoder.config
    attention = 32 * (4 + 2 * 2) * 8 + 32 * 32
    linears = config.num_layers * (attention + 3 * 32 * 64) + config.vocab_size * 32
    assert step_bytes(bench.plain, speculate=False) == size * linears
    engine = bench.engine(Case(str(folders / "drafter"), 3))
    own = 64 * (4 + 2 * 2) * 8 + 32 * 32 + 3 * 32 * 64 + 3 * 32 * 32 + config.vocab_size * 32
    assert step_bytes(engine, speculate=True) == size * (linears + 3 * own)


def test_matrix(bench, folders):
    drafter = str(folders / "drafter")
    cases = [Case(drafter, 2), Case(drafter, 3, TreeShape(2, 5)), Case("ngram", 3)]
    figures = run_bench(bench, cases, ITEMS, concurrencies=(1, 2), params=PARAMS, is_looping=lambda _: False)
    assert [result["concurrency"] for result in figures["results"]] == [1, 2]
    for result in figures["results"]:
        assert result["plain"]["tokens_per_second"] > 0
        for one in result["speculative"]:
            assert one["identical"]["same"] == one["identical"]["of"] == 4
            assert one["overhead"] == pytest.approx(one["tokens_per_pass"] / one["speed_up"] - 1)
            assert one["bandwidth_use"] > 0
    assert figures["results"][0]["speculative"][1]["tree"] == {"width": 2, "nodes": 5}
    assert figures["provenance"]["prompts_sha256"]


def test_kv_cache_is_sized_for_the_data(bench, folders):
    run = run_items(bench.plain, ITEMS, bench.encode, PARAMS, 3, speculate=False)
    longest = max(one.prompt_tokens + PARAMS.max_tokens for one in run.turns)
    assert longest <= bench.config.max_model_len < 2 * longest
    limited = Bench(str(folders / "model"), EngineConfig(), [Item("a", "b", ("the cat " * 400,))], 10)
    assert limited.config.max_model_len == 512  # the model's own limit


def test_a_prompt_that_does_not_fit_is_refused(bench):
    with pytest.raises(UserError, match="lower --max-tokens"):
        run_items(bench.plain, ITEMS, bench.encode, SamplingParams(max_tokens=600, temperature=0), 1, speculate=False)


def command():
    from fledge.cli.bench import bench as bench_command

    app = typer.Typer()
    app.command()(bench_command)
    return app


def test_command(folders, tmp_path):
    arguments = [folders / "model", "--drafter", folders / "drafter", "--limit", 1, "--category", "qa", "--max-tokens", 6]
    arguments += [
        "--depth",
        "2,3",
        "--dtype",
        "float32",
        "--out",
        tmp_path,
        "--baseline",
        "vllm",
        "--vllm-python",
        tmp_path / "nothing",
    ]
    result = CliRunner().invoke(command(), list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "accepted by position" in result.output
    assert "depth 2, chain" in result.output  # the table fits a terminal of 80 columns
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert [one["depth"] for one in stored["results"][0]["speculative"]] == [2, 3]
    assert (tmp_path / "speed.png").exists()
    assert (tmp_path / "acceptance.png").exists()
    assert stored["baselines"][0]["baseline"] == "vllm"
    assert "vllm, skipped: " in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--baseline", "transformers,tgi"], "'tgi' is not known; use one of transformers, vllm"),
        (["--baseline", "transformers", "--temperature", "0.7"], "leave out --temperature"),
        (["--assistant", "smollm2-135m"], "add --baseline transformers"),
        (["--baseline", "transformers", "--assistant", "./no/such/model"], "no/such/model"),
    ],
)
def test_invalid_baselines_are_refused_before_measuring(folders, monkeypatch, arguments, said):
    monkeypatch.setattr("fledge.bench.matrix.Bench", None)
    result = CliRunner().invoke(command(), [str(folders / "model"), *arguments])
    assert isinstance(result.exception, UserError), result.exception
    assert said in str(result.exception)


def test_results_are_written_before_other_engines_run(folders, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fledge.bench.matrix.run_baseline", interrupted)
    arguments = [folders / "model", "--drafter", "ngram", "--limit", 1, "--category", "qa", "--max-tokens", 4, "--depth", 2]
    CliRunner().invoke(command(), list(map(str, [*arguments, "--baseline", "vllm", "--out", tmp_path])))
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert stored["results"][0]["speculative"][0]["label"] == "ngram, depth 2, chain"
    assert "baselines" not in stored


@pytest.mark.parametrize("option", ["--concurrency", "--depth"])
def test_bad_lists_are_refused(folders, option):
    result = CliRunner().invoke(command(), [str(folders / "model"), option, "1,x"])
    assert isinstance(result.exception, UserError)
    assert option in str(result.exception)


def test_transformers_gives_the_same_answers(bench, folders):
    cases = [Case("ngram", 3)]
    torch.manual_seed(0)
    (result,) = baselines(bench, cases, ITEMS, ["transformers"], [1], PARAMS)
    assert "skipped" not in result, result
    assert [run["label"] for run in result["runs"]] == ["plain", "prompt look-up, depth 3"]
    for run in result["runs"]:
        assert run["identical"] == {"same": 3, "of": 3}
        assert run["tokens_per_second"] > 0
        assert 0 < run["first_token_seconds"] < run["seconds"]


def test_assisted_generation_gives_the_same_answers(folders, tmp_path):
    """Runs the command with another model of the same vocabulary as assistant, which is resolved as every model is."""
    assistant = make_model(tmp_path / "assistant", seed=1)
    arguments = [folders / "model", "--drafter", "ngram", "--limit", 1, "--category", "qa", "--max-tokens", 8, "--depth", 2]
    arguments += ["--dtype", "float32", "--baseline", "transformers", "--assistant", assistant, "--out", tmp_path / "out"]
    result = CliRunner().invoke(command(), list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    (baseline,) = json.loads((tmp_path / "out" / "bench.json").read_text())["baselines"]
    assert "skipped" not in baseline, baseline
    assert [run["label"] for run in baseline["runs"]] == [
        "plain", "prompt look-up, depth 2", "assistant, depth 2", "assistant, depth of its own",
    ]  # fmt: skip
    for run in baseline["runs"]:
        assert run["identical"] == {"same": 1, "of": 1}
        assert run["tokens_per_second_per_user"] > 0


def test_missing_engine_is_skipped_and_reported(folders, tmp_path):
    common = {"model": folders, "drafter": None, "depths": [3], "concurrencies": [1], "max_tokens": 4, "device": "cpu"}
    assert "cannot be run" in run_baseline("vllm", [[1]], **common, python=str(tmp_path / "nothing"))["skipped"]
    with pytest.raises(UserError, match="transformers, vllm"):
        run_baseline("tgi", [[1]], **common)


FAKE_VLLM = """
import importlib.util
from types import SimpleNamespace as Thing
for name in ("datasets", "kernels"):
    found = importlib.util.find_spec(name)
    assert found is None or "fledge" not in found.origin, f"{name} is ours"
__version__ = "0.0-fake"
class SamplingParams:
    def __init__(self, **options): self.options = options
class Engine:
    def __init__(self, depth): self.waiting, self.depth, self.drafts = [], depth, 0
    def add_request(self, identity, prompt, params): self.waiting.append((identity, prompt["prompt_token_ids"], params, [0]))
    def step(self):
        outs = []
        for identity, prompt, params, made in list(self.waiting):
            self.drafts += 1
            made[0] += 1
            finished = made[0] == params.options["max_tokens"]
            tokens = prompt[:1] * made[0]
            outs.append(Thing(request_id=identity, finished=finished, outputs=[Thing(token_ids=tokens)]))
            if finished: self.waiting = [one for one in self.waiting if one[0] != identity]
        return outs
class LLM:
    def __init__(self, model, speculative_config=None, **options):
        if speculative_config and "broken" in speculative_config["model"]: raise ValueError("no such drafter")
        self.llm_engine = Engine(speculative_config and speculative_config["num_speculative_tokens"])
    def get_metrics(self):
        if not self.llm_engine.depth: return []
        drafts = self.llm_engine.drafts
        counts = {"vllm:spec_decode_num_drafts": drafts, "vllm:spec_decode_num_accepted_tokens": 2 * drafts}
        return [Thing(name=name, value=value) for name, value in counts.items()]
"""


def test_vllm_runs_in_a_closed_loop(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prompts = [[5, 1], [6, 1], [7, 1]]
    result = run_baseline(
        "vllm", prompts, model=tmp_path, drafter=tmp_path, depths=[3], concurrencies=[1, 2], max_tokens=4, device="cpu"
    )
    assert result["version"] == "0.0-fake"
    assert [(run["label"], run["concurrency"]) for run in result["runs"]] == [
        ("plain", 1), ("plain", 2), ("EAGLE, depth 3", 1), ("EAGLE, depth 3", 2),
    ]  # fmt: skip
    for run in result["runs"]:
        assert run["answers"] == [[5] * 4, [6] * 4, [7] * 4]
        assert run["tokens"] == 12
    assert [run["acceptance_length_micro"] for run in result["runs"]] == [None, None, 3, 3]


def test_depth_is_fixed_unless_adaptive(bench, folders):
    fixed, adaptive = (bench.engine(Case(str(folders / "drafter"), 3, adaptive=rule)).controller for rule in (False, True))
    assert (fixed.adaptive, fixed.guard) == (False, None)
    assert adaptive.adaptive
    assert adaptive.guard is not None
    assert Case("auto", 3, adaptive=True).label != Case("auto", 3).label


def test_drafters_in_folders_of_the_same_name_get_different_labels(bench, tmp_path):
    for run, parts in (("a", {}), ("b", {"norm_output": True, "fc_norm": True})):
        save_drafter(tiny_drafter(tiny_drafter_config(bench.decoder.config, **parts)), tmp_path / run / "best")
    cases = [Case(str(tmp_path / run / "best"), depth) for run in ("a", "b", "a") for depth in (2, 3)]
    figures = run_bench(bench, cases, ITEMS[1:2], concurrencies=(1,), params=PARAMS, is_looping=lambda _: False)
    rows = figures["results"][0]["speculative"]
    assert [row["label"] for row in rows] == [f"{run}/best, depth {depth}, chain" for run in ("a", "b") for depth in (2, 3)]
    assert ["3.1" in row["drafter"] for row in rows] == [False, False, True, True]
    assert [row["depth"] for row in rows] == [2, 3, 2, 3]


def test_drafter_name_is_the_shortest_unique_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["x/a/best", "x/a/best/", "y/a/best", "x/last", "runs/ngram", "ngram", "auto"]
    assert list(drafter_names(asked).values()) == [
        "x/a/best", "x/a/best", "y/a/best", "last", "runs/ngram", "ngram", "auto",
    ]  # fmt: skip
    assert drafter_names(["."]) == {".": tmp_path.name}
    assert Case("x/a/best", 3).label == "best, depth 3, chain"


def test_vllm_runs_every_drafter_and_reports_where_it_stopped(bench, folders, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    drafters = [tmp_path / "a" / "best", tmp_path / "b" / "best"]
    for drafter in drafters:
        shutil.copytree(folders / "drafter", drafter)
    cases = [Case(name, 3) for name in (str(drafters[0]), "ngram", str(drafters[1]))]
    (result,) = baselines(bench, cases, ITEMS, ["vllm"], [1], PARAMS)
    labels = ["plain", "EAGLE a/best, depth 3", "EAGLE b/best, depth 3"]
    assert [run["label"] for run in result["runs"]] == labels
    assert "skipped" not in result

    shutil.copytree(folders / "drafter", broken := tmp_path / "broken")
    (result,) = baselines(bench, [*cases, Case(str(broken), 3)], ITEMS, ["vllm"], [1], PARAMS)
    assert [run["label"] for run in result["runs"]] == labels
    assert skipped_lines({"baselines": [result]}) == [
        "vllm, stopped after 3 runs: it ended with code 1: ValueError: no such drafter"
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    results = {"model": "m", "device": "cpu", "weights": "float32", "turns": 3, "max_tokens": 10, "results": []}
    console.print(table(results | {"baselines": [result]}))
    shown = console.export_text()
    assert "EAGLE b/best, depth 3" in shown
    assert "vllm: stopped after 3 runs" in shown
