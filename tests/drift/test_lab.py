"""The drift lab on a tiny model: every suite, the report, its verdicts, and the command."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.drift_figures import accepted_ratio, retention_difference
from fledge.bench.datasets import Item, load_items
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.drift import prompts as templates
from fledge.drift.lab import run_lab
from fledge.drift.metrics import (
    Count,
    MetricAccumulator,
    TextFigures,
    fused_parts,
    length_ratio,
    pooled,
)
from fledge.drift.prompts import Document, load_documents
from fledge.drift.results import verdict_table, verdicts
from fledge.drift.suites import (
    CONVERSATIONS,
    OPENING,
    Condition,
    Suite,
    chat_templates,
    chosen,
    lengths,
    multi_turn,
    within,
)
from fledge.drift.texts import load_subjects
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.errors import UserError
from fledge.sampling import SamplingParams
from fledge.tokenizer import Tokenizer
from fledge.training.data.templates import TEXT_TEMPLATES
from tests.drift.conftest import SETTINGS


def suite(figures, name):
    return next(one for one in figures["suites"] if one["name"] == name)


def test_all_suites_are_run(figures):
    assert [one["name"] for one in figures["suites"]] == [
        "domains", "templates", "system prompts", "context length", "multi-turn", "noise", "depth", "temperature",
    ]  # fmt: skip
    assert len(suite(figures, "domains")["conditions"]) == 11
    names = [one["name"] for one in suite(figures, "templates")["conditions"]]
    assert names == [
        "own",
        "no template",
        "no BOS",
        "ChatML",
        "Llama-3",
        "Alpaca",
        "Vicuna",
        "plain transcript",
        "Gemma",
        "Mistral",
    ]
    assert suite(figures, "depth")["depths"] == list(range(1, 10))
    assert len(suite(figures, "multi-turn")["conditions"]) == 4


def test_lengths_go_up_to_the_models_limit(figures):
    conditions = suite(figures, "context length")["conditions"]
    tokens = [one["prompt_tokens"] for one in conditions]
    assert [one["name"] for one in conditions] == ["128 tokens", "256 tokens", "1488 tokens"]
    for name, size in zip((128, 256, 1488), tokens, strict=True):
        assert name - 8 - OPENING <= size <= name
    assert [one["prompts"] for one in conditions] == [2, 2, 2]
    assert conditions[0]["drafters"]["three"]["retention"][5] == pytest.approx(1)
    assert conditions[0]["drafters"]["three"]["retention_error"][5] == pytest.approx(0)
    assert conditions[2]["drafters"]["three"]["pairs"] == 2


def test_probes_by_step_and_head(figures):
    for name, flat in (("three", False), ("three-one", True)):
        probes = figures["probes"][name]
        assert len(probes["rms"]) == len(probes["sink_share"]) == len(probes["sink_share_by_head"]) == 9
        assert len(probes["sink_share_by_head"][0]) == 4
        shares = [sum(probes[f"{part}_share"][3] for part in ("sink", "prompt", "answer", "own"))]
        assert shares[0] == pytest.approx(1)
        assert (abs(probes["rms_ratio"] - 1) < 0.1) == flat
    states = figures["target_states"]["three"]
    parts = [f"fc part of layer {layer}" for layer in (1, 2, 3)]
    assert list(states) == ["layer 1", "layer 2", "layer 3", "fc output", *parts]


def test_acceptance_equals_the_engines(figures, folders):
    """The engine serves the templates suite's prompts with the same drafter and depth."""
    tokenizer = Tokenizer(folders / "model")
    few = chosen(load_items("builtin", limit=1), 2)
    prompts = list(next(c for c in chat_templates(tokenizer, few).conditions if c.name == "Alpaca").prompts.values())
    engine = build_engine(str(folders / "model"), Speculation(str(folders / "three-one"), 3).fixed_depth())
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=12))
    while engine.has_unfinished():
        engine.step()
    condition = next(c for c in suite(figures, "templates")["conditions"] if c["name"] == "Alpaca")
    assert condition["drafters"]["three-one"]["acceptance_length"][3] == pytest.approx(engine.stats.acceptance_length)


def test_verdicts_distinguish_growing_and_constant_states(figures):
    found = {name: {one.what: one for one in verdicts(figures, name)} for name in ("three", "three-one")}
    size = "fed-back RMS, step 8 over step 1"
    assert not found["three"][size].passed
    assert found["three-one"][size].passed
    head, rows = verdict_table(figures)
    assert head == ["", "limit", *(one["name"] for one in figures["drafters"])]
    row = next(row for row in rows if row[0] == size)
    assert row[2] == f"{figures['probes']['three']['rms_ratio']:.2f} ✗"
    assert row[3] == f"{figures['probes']['three-one']['rms_ratio']:.2f} ✓"
    assert rows[0][0] == "acceptance length at depth 5, all prompts"


def test_the_command_writes_a_self_contained_report(figures, tmp_path, monkeypatch):
    import typer

    from fledge.cli.drift import drift

    monkeypatch.setattr("fledge.drift.lab.run_lab", lambda *_, **__: figures)
    app = typer.Typer()
    app.command()(drift)
    result = CliRunner().invoke(app, ["model", "--drafter", "three", "--drafter", "three-one", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "fed-back RMS" in result.output
    assert f"{figures['seconds']:.0f} s" in result.output
    page = (tmp_path / "report.html").read_text()
    assert "http" not in re.sub(r"base64,[^']+", "", page)
    assert page.count("data:image/png;base64,") == len(list((tmp_path / "plots").glob("*.png"))) == 11
    assert "fed-back RMS, step 8 over step 1" in page
    assert figures["drafters"][0]["weights_sha256"] in page
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["provenance"]["prompts_sha256"] == figures["provenance"]["prompts_sha256"]
    assert stored["verdicts"]["three"][1]["passed"] is False


def test_training_settings_are_read_from_the_drafters_folder(folders, tmp_path):
    shutil.copytree(folders / "three", tmp_path / "known")
    augmentation = {"template_probability": 0.1, "no_template_probability": 0.05, "templates": ["alpaca"]}
    recipe = {
        "seed": 3,
        "data": {"sequence_length": 64, "augmentation": augmentation},
        "objective": {"ttt_steps": 3},
        "optimizer": {"learning_rate": 1e-3},
    }
    (tmp_path / "known" / "provenance.json").write_text(json.dumps({"step": 9, "recipe": recipe}))
    config = EngineConfig(device="cpu", dtype="float32")
    subject = load_subjects([f"known={tmp_path / 'known'}"], "", load_decoder(folders / "model"), config)[0]
    assert subject.name == "known"
    expected = {
        "sequence_length": 64,
        "ttt_steps": 3,
        "augmented": True,
        "templates": ["alpaca", "none"],
        "steps": 9,
        "seed": 3,
    }
    assert subject.trained.items() >= expected.items()
    assert subject.weights_sha256 == hashlib.sha256((folders / "three" / "model.safetensors").read_bytes()).hexdigest()


def test_a_drafter_without_states_is_refused(folders):
    with pytest.raises(UserError, match="ngram"):
        run_lab(str(folders / "model"), ["ngram"], settings=SETTINGS)


def test_a_condition_without_answers_has_empty_figures():
    figures = MetricAccumulator((1, 3)).to_dict()
    assert figures["acceptance_length"] == {1: 1.0, 3: 1.0}
    assert figures["texts"] == 0


def test_a_drafter_that_accepts_almost_nothing_fails_its_verdict(figures):
    probes = {**figures["probes"]["three"], "acceptance_length": {5: 1.05}}
    first = verdicts({**figures, "probes": {**figures["probes"], "three": probes}}, "three")[0]
    assert (first.value.split(";")[0], first.limit, first.passed) == ("1.05", "≥ 1.2", False)


def test_no_bos_drops_the_first_token(folders):
    tokenizer = Tokenizer(folders / "model")
    messages = [{"role": "user", "content": "the cat"}]
    own = templates.own_template(tokenizer, messages)
    assert tuple(templates.all_templates(tokenizer, messages)) == templates.TEMPLATE_NAMES
    assert templates.no_bos(tokenizer, messages) == own[1:]
    assert templates.foreign(tokenizer, "ChatML", messages) == own
    assert "### Response:" in tokenizer.decode(templates.foreign(tokenizer, "Alpaca", messages))


def test_later_turns_contain_the_targets_answers(folders):
    tokenizer = Tokenizer(folders / "model")
    answer = tokenizer.encode("the lazy dog")

    def answers(prompts):
        return [[*answer, 2] for _ in prompts]

    made = multi_turn(tokenizer, [Item("a", "b", ("one", "two"))], 1, answers, 1000, (2,))
    text = tokenizer.decode(made.conditions[1].prompts["conversation 0"], skip_special_tokens=False)
    assert "the lazy dog<|im_end|>" in text
    assert "east" in text


def test_a_conversation_that_is_too_long_ends(folders):
    """Skipping a turn is not possible: some templates refuse two user turns in a row."""
    tokenizer, items = Tokenizer(folders / "model"), [Item("a", "b", ("one", "cat " * 900, "two"))]
    made = multi_turn(tokenizer, items, len(CONVERSATIONS) + 1, lambda prompts: [[3, 2]] * len(prompts), 900, (2,))
    last = f"conversation {len(CONVERSATIONS)}"
    assert [last in condition.prompts for condition in made.conditions[:3]] == [True, False, False]
    assert "conversation 0" in made.conditions[2].prompts


def test_documents(tmp_path, folders):
    documents, source = load_documents(None)
    assert "Python" in source
    assert all(len(document.text) > 2000 for document in documents)
    with pytest.raises(UserError, match=r"no \.txt"):
        load_documents(tmp_path)
    (tmp_path / "a.txt").write_text("A real text. " * 400)
    documents, _ = load_documents(tmp_path)
    assert isinstance(documents[0], Document)


def test_answers_at_every_length_have_the_same_opening(folders):
    tokenizer, asked = Tokenizer(folders / "model"), []
    document = Document("cats", "the lazy dog sees the cat. " * 400)

    def answer(prompts):
        asked.extend(prompts)
        return [[number + 3] * (80 if number else 8) for number in range(len(prompts))]  # the first answer is short

    item = Item("a", "b", ("Is it late?",))
    made = lengths(tokenizer, [document], [item], (200, 400, 4000), 2, 2, answer, 1000, "mine")
    assert [condition.name for condition in made.conditions] == ["200 tokens", "400 tokens", "1000 tokens"]
    assert len(asked) == 4
    names = [list(condition.prompts) for condition in made.conditions]
    assert names[0] == names[1] == names[2]
    assert len(names[0]) == 4
    for condition, size in zip(made.conditions, (200, 400, 1000), strict=True):
        for number, prompt in enumerate(condition.prompts.values()):
            common = OPENING if number else 2
            assert size - 8 - OPENING + common <= len(prompt) <= size
            assert prompt[-common:] == (number + 3,) * common
    texts = [tokenizer.decode(prompt) for prompt in made.conditions[1].prompts.values()]
    assert sum("Is it late?" in text for text in texts) == 2


def test_lengths_filled_by_the_template_are_left_out(folders):
    tokenizer = Tokenizer(folders / "model")
    preamble = "{{ '<|im_start|>system\n" + "the lazy dog " * 40 + "<|im_end|>\n' }}"
    template = preamble + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (copy := folders / "wordy").mkdir()
    for file in (folders / "model").iterdir():
        shutil.copy(file, copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    document, item = Document("cats", "the lazy dog sees the cat. " * 400), Item("a", "b", ("Is it late?",))
    given = len(Tokenizer(copy).apply_chat_template([{"role": "user", "content": ""}]))
    sizes = (given, 2 * given)

    def made(tokenizer, sizes):
        found = lengths(tokenizer, [document], [item], sizes, 1, 2, lambda prompts: [[5] * 80] * len(prompts), 4000, "mine")
        assert all(prompt for condition in found.conditions for prompt in condition.prompts.values())
        return [condition.name for condition in found.conditions]

    assert made(tokenizer, sizes) == [f"{size} tokens" for size in sizes]
    assert made(Tokenizer(copy), sizes) == [f"{2 * given} tokens"]
    assert made(Tokenizer(copy), sizes[:1]) == []


def test_no_room_for_prompts_is_refused(folders):
    with pytest.raises(UserError, match=r"48 tokens of context less 12 for the answer leave 36; raise --max-model-len"):
        run_lab(str(folders / "model"), [str(folders / "three")], settings=SETTINGS, dtype="float32", max_model_len=48)


def test_a_baseline_that_does_not_fit_is_none():
    conditions = [Condition("own", {"a": (1,) * 9}), Condition("no template", {"a": (1,) * 4})]
    suite = Suite("templates", "", conditions, "own")
    assert within(suite, 9).baseline == "own"
    assert (within(suite, 5).baseline, [one.name for one in within(suite, 5).conditions]) == (None, ["no template"])


def test_lab_templates_are_not_training_templates_unless_marked():
    """Training's augmentation renders only the marked templates the same way, apart from a preamble or white space."""
    messages = [{"role": "user", "content": "QUESTION"}]

    def bare(text):
        return re.sub(r"\s+", "", text)

    trained = {name: template.user + template.opening for name, template in TEXT_TEMPLATES.items()}
    trained = {name: bare(text.replace("{}", "QUESTION")) for name, text in trained.items()}
    for name, template in templates.FOREIGN.items():
        known = [other for other, text in trained.items() if bare(template.render(messages)).endswith(text)]
        assert known == ([templates.TRAINED_AS[name]] if name in templates.TRAINED_AS else []), name
    assert templates.trained_on({"augmented": True, "templates": ["alpaca", "none"]}) == ["no template", "Alpaca"]
    assert templates.trained_on({"augmented": False, "templates": ["alpaca"]}) == []


def test_parts_of_the_fused_input_add_up(folders):
    decoder = load_decoder(folders / "model")
    for name in ("three", "three-one"):
        drafter = load_drafter(folders / name, decoder.config)
        taps = [torch.randn(5, decoder.config.hidden_size) * scale for scale in (1, 10, 100)]
        output, *parts = fused_parts(drafter, taps).values()
        assert len(parts) == 3
        torch.testing.assert_close(sum(parts), output, rtol=1e-4, atol=1e-4 * float(output.abs().max()))
        torch.testing.assert_close(output, drafter.fuse(taps))
    assert not drafter.fc._forward_pre_hooks


def test_figures_without_loops_and_errors_of_changes():
    accumulator, ones = MetricAccumulator((1,)), torch.ones(2, dtype=torch.double)
    for name, right, size, looping in (("a", 0.0, 1.0, False), ("b", 4.0, 3.0, True), ("c", 2.0, 2.0, False)):
        sums = {"joint_acceptance": (ones * right, ones * 4), "rms": (torch.tensor([4.0, 4 * size]).double(), ones * 4)}
        accumulator.add(name, TextFigures({1: Count(1, 2)}, sums), looping)
    found = accumulator.to_dict()
    assert found["joint_acceptance"] == [0.5, 0.5]
    assert found["joint_acceptance_not_looping"] == [0.25, 0.25]
    assert (found["rows_inside"], found["rows_inside_not_looping"]) == ([12, 12], [8, 8])
    assert found["rms_ratio"] == 2
    assert found["rms_change_error"] == pytest.approx((2 / 3 / 2) ** 0.5)  # standard error of the mean of 1, 2 and 3


def test_a_prompt_under_two_conditions_is_one_sample():
    """Counting the same prompt twice adds no information: the error must not shrink."""
    once = {"a": Count(10, 10), "b": Count(20, 10), "c": Count(24, 10)}
    base = {"a": Count(10, 10), "b": Count(10, 10), "c": Count(10, 10)}
    single = length_ratio(list(once.values()), list(base.values()))
    twice, base_twice = pooled([once, once]), pooled([base, base])
    assert length_ratio(list(twice.values()), list(base_twice.values())) == pytest.approx(single)
    assert length_ratio([*once.values()] * 2, [*base.values()] * 2).error < single.error


def test_errors_of_accepted_ratios_equal_the_jackknifes():
    torch.manual_seed(0)
    draw = [
        [Count(float(a), float(s)) for a, s in zip(torch.rand(40) * 30 + 20, torch.rand(40) * 5 + 10, strict=True)]
        for _ in "abcd"
    ]

    def jackknife(value):
        left_out = [value([one[:i] + one[i + 1 :] for one in draw]) for i in range(40)]
        mean = sum(left_out) / 40
        return (39 / 40 * sum((one - mean) ** 2 for one in left_out)) ** 0.5

    ratio = accepted_ratio(draw[0], draw[1])
    assert ratio.error == pytest.approx(jackknife(lambda d: accepted_ratio(d[0], d[1]).value), rel=0.1)
    more = retention_difference((draw[0], draw[1]), (draw[2], draw[3]))
    assert more.value == pytest.approx(ratio.value - accepted_ratio(draw[2], draw[3]).value)
    assert more.error == pytest.approx(jackknife(lambda d: retention_difference((d[0], d[1]), (d[2], d[3])).value), rel=0.1)
    nothing = [Count(0, 5)] * 40
    assert accepted_ratio(draw[0], nothing).error is None
