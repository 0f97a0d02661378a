"""Answers from the target: turn by turn, resumable, with exact token ids; and prompts that the target writes."""

from __future__ import annotations

import gzip
import json
import random
from itertools import islice, takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fledge.errors import UserError
from fledge.progress import Task
from fledge.training.data.chat_files import DataError, read_conversations
from fledge.training.data.loading import tokenize_conversation
from fledge.training.data.rendering import ChatFormat
from fledge.training.datagen.prompts import read_prompts
from fledge.training.datagen.regenerate import regenerate
from tests.training.chat import INSTRUCT, QWEN3, TOOLS, assistant, chat_tokenizer, system, user


class EchoGenerator:
    """Answers "You said: <the last user turn>", out of order, and records its calls."""

    def __init__(
        self,
        tokenizer,
        *,
        fail_after: int | None = None,
        max_model_len: int = 10**6,
        strip_stop: bool = False,
        concurrency: int = 10**6,
    ):
        self.tokenizer, self.fail_after, self.strip_stop = tokenizer, fail_after, strip_stop
        self.max_model_len, self.concurrency = max_model_len, concurrency
        self.calls: list[dict] = []  # one entry per call, with its prompts
        self.seeds: list[int] = []
        self.answered = 0
        self.busy = False

    def reply(self, prompt: str, draw: random.Random) -> str:
        return "You said: " + prompt.split("user\n")[-1].split("<|im_end|>")[0]

    def generate(self, prompts, *, max_tokens, temperature, top_p, seed, stop_ids):
        prompts, taken = iter(prompts), 0
        seed_of = seed if callable(seed) else lambda index: seed + index
        assert not self.busy, "only one call at a time is allowed, as on a GPU"
        self.busy = True
        try:
            while batch := list(takewhile(lambda prompt: prompt is not None, islice(prompts, self.concurrency))):
                self.calls.append({"prompts": batch, "temperature": temperature, "seed": seed, "stop_ids": list(stop_ids)})
                seeds = [seed_of(taken + index) for index in range(len(batch))]
                for index, ids, reason in self.answers(batch, max_tokens, seeds, stop_ids):
                    yield taken + index, ids, reason
                taken += len(batch)
        finally:
            self.busy = False

    def answers(self, prompts, max_tokens, seeds, stop_ids):
        for index in reversed(range(len(prompts))):
            if self.answered == self.fail_after:
                raise KeyboardInterrupt
            self.answered += 1
            self.seeds.append(seeds[index])
            prompt = self.tokenizer.decode(prompts[index], skip_special_tokens=False)
            text = self.reply(prompt, random.Random(self.seeds[-1]))
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            end = [] if self.strip_stop else [stop_ids[0]]
            yield (index, ids[:max_tokens], "length") if len(ids) >= max_tokens else (index, ids + end, "stop")


class WritingGenerator(EchoGenerator):
    """Also writes user turns: a few different ones, some unusable."""

    def reply(self, prompt: str, draw: random.Random) -> str:
        if prompt.endswith("user\n"):
            return draw.choice(["short", "and so on " * 60, f"What is {draw.randrange(40)} plus three, please?"])
        return super().reply(prompt, draw)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_refusal_leaves_no_file(tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", {"prompt": "Hi"})
    without = chat_tokenizer(chat_template=None)
    with pytest.raises(UserError, match="no chat template"):
        regenerate(EchoGenerator(without), without, prompts, tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="no such file"):
        regenerate(
            EchoGenerator(chat_tokenizer()),
            chat_tokenizer(),
            prompts,
            tmp_path / "out.jsonl",
            decontaminate=["nowhere"],
        )
    assert list(tmp_path.iterdir()) == [prompts]


def records(path: Path) -> dict[str, dict]:
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_reads_every_form_of_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl.gz"
    lines = [
        {"id": 1, "source": "s", "turns": ["Hi", "Bye"]},
        {"messages": [system("S"), user("Hi"), assistant("given answers are dropped"), user("Bye"), assistant("x")]},
        {"prompt": "Hi"},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    turns, messages, prompt = read_prompts(path)
    assert (turns.id, turns.turns, turns.source) == ("1", ("Hi", "Bye"), "s")
    assert (messages.turns, messages.system) == (("Hi", "Bye"), "S")
    assert prompt.turns == ("Hi",)
    assert prompt.id != messages.id
    for bad in ({"text": "x"}, {"turns": []}, {"turns": ["Hi", ""]}, {"messages": [{"role": "tool", "content": "x"}]}):
        with pytest.raises(DataError, match="line 1"):
            list(read_prompts(write(tmp_path / "bad.jsonl", bad)))


def test_multi_turn_answers_keep_their_ids_into_training(tmp_path):
    tokenizer = chat_tokenizer()
    generator = EchoGenerator(tokenizer)
    prompts = write(tmp_path / "p.jsonl", {"id": "a", "turns": ["Hi", "How are you?", "Bye"]}, {"id": "b", "prompt": "One"})
    out = tmp_path / "answers.jsonl"
    report = regenerate(generator, tokenizer, prompts, out, max_tokens=64)
    assert (report.conversations, report.answers, report.looping) == (2, 4, 0)
    done = records(out)
    assert done["a"]["messages"][1::2] == [assistant(f"You said: {text}") for text in ("Hi", "How are you?", "Bye")]
    assert done["a"]["messages"][0::2] == [user("Hi"), user("How are you?"), user("Bye")]
    # Prompts equal those of serving, and one conversation becomes one sample with three answers.
    assert done["a"]["turns_ids"][2]["prompt_ids"] == tokenizer.apply_chat_template(done["a"]["messages"][:5])
    conversation = next(c for c in read_conversations(out) if len(c.turns) == 3)
    sample = tokenize_conversation(conversation, ChatFormat(tokenizer))
    spans = [sample.tokens[start:stop].tolist() for start, stop in sample.answers()]
    assert spans == [turn["answer_ids"] for turn in done["a"]["turns_ids"]]
    assert all(span[-1] == tokenizer.eos_token_ids[0] for span in spans)
    assert report.answer_tokens == sum(map(len, spans)) + len(done["b"]["turns_ids"][0]["answer_ids"])


def test_answers_without_their_stop_id_get_it_and_cut_ones_do_not(tmp_path):
    tokenizer = chat_tokenizer()
    prompts = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "Hi"}, {"id": "b", "turns": ["x" * 99, "Go on"]})
    report = regenerate(EchoGenerator(tokenizer, strip_stop=True), tokenizer, prompts, tmp_path / "o.jsonl", max_tokens=20)
    done = records(tmp_path / "o.jsonl")
    assert done["a"]["turns_ids"][0]["answer_ids"][-1] == tokenizer.eos_token_ids[0]
    first, second = done["b"]["turns_ids"]
    assert (first["finish_reason"], len(first["answer_ids"]), report.cut_off) == ("length", 20, 1)
    # The template ends the cut-off answer in the next prompt; that end token has no loss in training.
    seen = first["prompt_ids"] + first["answer_ids"]
    assert second["prompt_ids"][: len(seen) + 1] == [*seen, tokenizer.eos_token_ids[0]]


def test_templates_that_rewrite_history_still_give_exact_samples(tmp_path):
    tokenizer = chat_tokenizer(QWEN3)

    class Thinker(EchoGenerator):
        def reply(self, prompt, draw):
            return "<think>\nhm\n</think>\n\n" + super().reply(prompt, draw)

    prompts = write(tmp_path / "p.jsonl", {"id": "a", "turns": ["Hi", "Bye"]})
    regenerate(Thinker(tokenizer), tokenizer, prompts, tmp_path / "o.jsonl", max_tokens=64)
    (record,) = records(tmp_path / "o.jsonl").values()
    conversations = list(read_conversations(tmp_path / "o.jsonl"))
    assert record["turns_ids"][1]["prompt_ids"] == tokenizer.apply_chat_template(record["messages"][:3])
    assert [c.turns[0].prompt_ids for c in conversations] == [turn["prompt_ids"] for turn in record["turns_ids"]]


def test_stopped_run_resumes_and_drops_incomplete_line(tmp_path, monkeypatch):
    tokenizer = chat_tokenizer()
    lines = [{"id": f"p{n}", "turns": [f"Number {n}"] + ["And?"] * (n % 2)} for n in range(10)]
    prompts, out, whole = write(tmp_path / "p.jsonl", *lines), tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(EchoGenerator(tokenizer, fail_after=6), tokenizer, prompts, out)
    finished = records(out)
    assert 0 < len(finished) < 10
    with out.open("a") as file:
        file.write('{"id":"p0","messages":[{"role":"us')
    generator, bars = EchoGenerator(tokenizer), []
    monkeypatch.setattr("fledge.progress.task", lambda *args, **kwargs: bars.append(kwargs) or Task(*args, **kwargs))
    report = regenerate(generator, tokenizer, prompts, out)
    assert report.already_done == len(finished)
    assert bars == [{"done": len(finished)}]  # the rate excludes earlier answers
    assert len(generator.calls[0]["prompts"]) == 10 - len(finished)
    regenerate(EchoGenerator(tokenizer), tokenizer, prompts, whole)
    assert records(out) == records(whole)
    assert len(out.read_text().splitlines()) == 10
    # Nothing left to do: the generator is not called.
    generator = EchoGenerator(tokenizer)
    regenerate(generator, tokenizer, prompts, out)
    assert generator.calls == []


def test_answer_file_refuses_other_settings(tmp_path):
    tokenizer = chat_tokenizer()
    prompts, out = write(tmp_path / "p.jsonl", {"prompt": "Hi"}), tmp_path / "o.jsonl"
    regenerate(EchoGenerator(tokenizer), tokenizer, prompts, out, model="a")
    with pytest.raises(DataError, match=r"temperature '0\.0', now it is '0\.7'"):
        regenerate(EchoGenerator(tokenizer), tokenizer, prompts, out, model="a", temperature=0.7)
    with pytest.raises(DataError, match="model 'a'"):
        regenerate(EchoGenerator(tokenizer), tokenizer, prompts, out, model="b")
    with pytest.raises(DataError, match="cannot be continued"):
        regenerate(EchoGenerator(tokenizer), tokenizer, prompts, write(tmp_path / "mine.jsonl", {"my": "data"}))
    with pytest.raises(DataError, match="gz"):
        regenerate(EchoGenerator(tokenizer), tokenizer, prompts, tmp_path / "o.jsonl.gz")
    assert records(tmp_path / "o.jsonl").keys() == {read_prompts(prompts).__next__().id}


def test_counts_duplicates_long_prompts_refusals_and_loops(tmp_path):
    tokenizer = chat_tokenizer()

    class Looper(EchoGenerator):
        def reply(self, prompt, draw):
            return "again and again " * 30

    lines = [{"prompt": "Hi"}, {"prompt": "Hi"}, {"prompt": "x" * 500}, {"id": "late", "turns": ["Hi", "x" * 500]}]
    prompts = write(tmp_path / "p.jsonl", *lines)
    generator = Looper(tokenizer, max_model_len=600)
    report = regenerate(generator, tokenizer, prompts, tmp_path / "o.jsonl", max_tokens=256)
    assert (report.duplicates, report.too_long, report.conversations, report.looping) == (1, 1, 2, 2)
    assert len(records(tmp_path / "o.jsonl")["late"]["messages"]) == 2  # ends when the context is full
    assert all(record["looping"] for record in records(tmp_path / "o.jsonl").values())
    assert "2 looping" in str(report)
    refusing = chat_tokenizer(INSTRUCT)
    prompts = write(tmp_path / "p2.jsonl", {"prompt": "Hi", "system": "S"}, {"prompt": "Hi"})
    report = regenerate(EchoGenerator(refusing), refusing, prompts, tmp_path / "o2.jsonl")
    assert (report.refused, report.conversations) == (1, 1)


def test_limit_and_follow_ups(tmp_path):
    tokenizer = chat_tokenizer()
    prompts = write(tmp_path / "p.jsonl", *({"id": f"p{n}", "turns": ["Hi", "Bye"]} for n in range(20)))
    generator = EchoGenerator(tokenizer, concurrency=4)
    report = regenerate(generator, tokenizer, prompts, tmp_path / "o.jsonl", limit=10)
    assert (report.conversations, report.answers) == (10, 20)
    assert [len(call["prompts"]) for call in generator.calls] == [4, 4, 4, 4, 2, 2]
    assert len(set(generator.seeds)) == 20


def test_self_prompted(tmp_path):
    tokenizer, out = chat_tokenizer(), tmp_path / "o.jsonl"
    generator = WritingGenerator(tokenizer)
    report = regenerate(generator, tokenizer, None, out, self_prompted=12, max_tokens=64)
    # The prompt is only the start of a user turn with the default system prompt, sampled at temperature 1.
    opening = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(generator.calls[0]["prompts"][0], skip_special_tokens=False) == opening
    assert generator.calls[0]["temperature"] == 1.0
    done = records(out)
    assert report.conversations == len(done) == 12
    assert report.self_rejected > 0
    for record in done.values():
        asked, answered = (message["content"] for message in record["messages"])
        assert asked.startswith("What is ")
        assert answered == f"You said: {asked}"
    assert len({record["messages"][0]["content"] for record in done.values()}) == 12
    # A resumed run only generates the missing prompts, with other seeds.
    more = WritingGenerator(tokenizer)
    report = regenerate(more, tokenizer, None, out, self_prompted=15, max_tokens=64)
    assert (report.conversations, report.already_done, len(records(out))) == (3, 12, 15)
    assert more.calls[0]["seed"] not in {call["seed"] for call in generator.calls}


def test_neighbouring_seeds_draw_different_prompts(tmp_path):
    tokenizer, drawn = chat_tokenizer(), []
    for seed in (0, 1):
        generator = WritingGenerator(tokenizer)
        regenerate(generator, tokenizer, None, tmp_path / f"{seed}.jsonl", self_prompted=12, seed=seed, max_tokens=64)
        drawn.append({call["seed"] for call in generator.calls if call["temperature"] == 1.0})
    assert len(drawn[0]) > 1
    assert not drawn[0] & drawn[1]


def test_a_target_that_cannot_write_prompts_is_reported(tmp_path):
    class Mute(EchoGenerator):
        def reply(self, prompt, draw):
            return "?"

    tokenizer = chat_tokenizer()
    with pytest.raises(DataError, match="hardly any usable prompts"):
        regenerate(Mute(tokenizer), tokenizer, None, tmp_path / "o.jsonl", self_prompted=5)
    with pytest.raises(DataError, match="nothing to answer"):
        regenerate(Mute(tokenizer), tokenizer, None, tmp_path / "o.jsonl")


def test_command_line(tmp_path):
    """End to end, with a tiny model on the CPU engine."""
    import typer

    from fledge.cli.regenerate import regenerate as command
    from tests.interop.tiny_models import save_target, tiny_target

    app = typer.Typer()
    app.command()(command)
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant{% endif %}"
    model = str(save_target(tiny_target(), tmp_path / "model", template))
    prompts = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "w7 w8"}, {"id": "b", "turns": ["w9", "w20 w21"]})
    out = tmp_path / "o.jsonl"
    arguments = ["--model", model, "--prompts", str(prompts), "--out", str(out), "--max-tokens", "9", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert records(out).keys() == {"a", "b"}
    assert [len(turn["answer_ids"]) for turn in records(out)["b"]["turns_ids"]] == [9, 9]
    assert "tokens/s" in result.stderr
    nothing = CliRunner().invoke(app, ["--model", model, "--out", str(out)])
    assert isinstance(nothing.exception, DataError)


def test_tools_and_thinking_reach_the_prompt_and_the_file(tmp_path):
    tokenizer = chat_tokenizer(TOOLS)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    lines = [{"prompt": "How is Oslo?"}, {"prompt": "How is Oslo?", "tools": tools}]
    lines.append({"prompt": "How is Oslo?", "chat_template_kwargs": {"enable_thinking": False}})
    generator, out = EchoGenerator(tokenizer), tmp_path / "out.jsonl"
    report = regenerate(generator, tokenizer, write(tmp_path / "prompts.jsonl", *lines), out)
    assert report.conversations == 3  # the same text with other options is another prompt
    prompts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in generator.calls[0]["prompts"]]
    assert ["weather" in prompt for prompt in prompts] == [False, True, False]
    assert [prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts] == [False, False, True]
    written = {line["messages"][0]["content"] + str(line.get("tools")): line for line in map(json.loads, out.open())}
    assert len(written) == 2
    options = [conversation.options for conversation in read_conversations(out)]
    assert {"tools": tools} in options
    assert {"enable_thinking": False} in options


def test_after_a_tools_result_the_last_message_is_answered(tmp_path):
    """Only the last answer is regenerated, because the target might call other tools. Template errors are counted."""
    tokenizer = chat_tokenizer(QWEN3)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}
    result, tools = {"role": "tool", "content": "rain"}, [{"type": "function", "function": {"name": "weather"}}]
    asked = [user("How is Oslo?"), call, result]
    lines = [
        {"id": "a", "messages": [*asked, assistant("It rains.")], "tools": tools},
        {"id": "b", "messages": [*asked, assistant("It rains."), user("And Rome?")], "tools": tools, "system": "Be brief."},
    ]
    prompts = write(tmp_path / "p.jsonl", *lines)
    generator, out = EchoGenerator(tokenizer), tmp_path / "o.jsonl"
    report = regenerate(generator, tokenizer, prompts, out)
    assert report.conversations == 2
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in generator.calls[0]["prompts"]]
    assert texts[0].endswith("<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert '<tool_call>\n{"name": "weather"' in texts[0]
    assert texts[1].endswith("It rains.<|im_end|>\n<|im_start|>user\nAnd Rome?<|im_end|>\n<|im_start|>assistant\n")
    written = records(out)
    assert [len(written[name]["turns_ids"]) for name in "ab"] == [1, 1]
    assert [message["role"] for message in written["a"]["messages"]] == ["user", "assistant", "tool", "assistant"]
    for conversation in read_conversations(out):
        sample = tokenize_conversation(conversation, ChatFormat(tokenizer))
        (turn,) = conversation.turns
        assert sample.tokens.tolist() == [*turn.prompt_ids, *turn.answer_ids]
        assert sample.loss_mask.sum() == len(turn.answer_ids)
    refused = regenerate(EchoGenerator(chat_tokenizer(STRICT)), chat_tokenizer(STRICT), prompts, tmp_path / "refused.jsonl")
    assert (refused.conversations, refused.refused) == (0, 2)


STRICT = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + INSTRUCT
