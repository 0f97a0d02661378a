"""Worker processes: same answers as without them; runs that end early by time limit, interrupt, kill or error."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fledge.tokenizer import Tokenizer
from fledge.training.data.workers import Here, Processes, WorkerError, find_workers
from fledge.training.datagen import conversations
from fledge.training.datagen import regenerate as regeneration
from fledge.training.datagen.conversations import HostWork
from fledge.training.datagen.regenerate import regenerate
from tests.training.chat import INSTRUCT, chat_tokenizer

ROOT = Path(__file__).parent.parent.parent


def interrupt() -> None:
    raise KeyboardInterrupt


class StreamGenerator:
    """Takes a few prompts at a time from the iterator. An answer depends only on the prompt and its seed."""

    concurrency, max_model_len = 5, 400

    def __init__(self, tokenizer: Tokenizer, stop_after: int | None = None, stop=interrupt):
        self.tokenizer, self.stop_after, self.stop = tokenizer, stop_after, stop
        self.answered = 0

    def generate(self, prompts, *, max_tokens, temperature, top_p, seed, stop_ids):
        under_way: dict[int, list[int]] = {}
        prompts, taken, over = iter(prompts), 0, False
        seed_of = seed if callable(seed) else lambda index: seed + index
        while under_way or not over:
            while len(under_way) < self.concurrency and not over:
                prompt = next(prompts, "end")
                over = prompt == "end"
                if over or prompt is None:
                    break
                under_way[taken] = prompt
                taken += 1
            if not under_way:
                continue
            index = max(under_way)
            if self.answered == self.stop_after:
                self.stop()
            self.answered += 1
            yield index, self.answer(under_way.pop(index), random.Random(seed_of(index)), max_tokens, stop_ids), "stop"

    def answer(self, prompt, draw, max_tokens, stop_ids):
        asked = self.tokenizer.decode(prompt, skip_special_tokens=False).split("user\n")[-1].split("<|im_end|>")[0]
        text = f"You said: {asked} {draw.randrange(10**6)} " * draw.choice([1, 1, 12])
        return [*self.tokenizer.encode(text, add_special_tokens=False)[: max_tokens - 1], stop_ids[0]]


class FailingTokenizer(Tokenizer):
    """A tokenizer that raises or exits when it decodes answers that say so."""

    def decode(self, ids, skip_special_tokens=True):
        text = super().decode(ids, skip_special_tokens)
        if skip_special_tokens and "You said: raise" in text:
            raise RuntimeError("cannot be decoded")
        if skip_special_tokens and "You said: die" in text:
            os._exit(7)
        return text


def failing_tokenizer() -> Tokenizer:
    made = FailingTokenizer.__new__(FailingTokenizer)
    made.__dict__ = chat_tokenizer().__dict__
    return made


def write_prompts(path: Path, count: int = 60, **extra: str) -> Path:
    lines = [{"id": f"p{n}", "turns": [f"Number {n}"] + ["And?"] * (n % 3)} for n in range(count)]
    lines[7]["turns"] = ["x" * 500]
    lines[8]["turns"] = ["Hi", "x" * 500]
    lines += [{"id": name, "prompt": text} for name, text in extra.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def records(path: Path) -> dict[str, dict]:
    lines = path.read_text().splitlines()
    found = {record["id"]: record for record in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def run(out: Path, generator=StreamGenerator, tokenizer=None, **options):
    tokenizer = tokenizer or chat_tokenizer()
    generator = generator(tokenizer) if isinstance(generator, type) else generator
    settings = {"max_tokens": 200, "temperature": 0.7}
    return regenerate(generator, tokenizer, out.parent / "p.jsonl", out, **settings | options)


@pytest.mark.parametrize("processes", [0, 2])
def test_no_prompt_starts_after_the_time_limit(processes, tmp_path, monkeypatch):
    write_prompts(tmp_path / "p.jsonl")
    asked = itertools.count()
    monkeypatch.setattr(regeneration._Run, "_is_late", property(lambda _: next(asked) >= 20))
    report = run(tmp_path / "some.jsonl", processes=processes, max_seconds=1e9)
    assert report.settled == 20
    monkeypatch.undo()
    assert run(tmp_path / "some.jsonl", processes=processes, max_seconds=-1.0).conversations == 0
    run(tmp_path / "some.jsonl", processes=processes)
    run(tmp_path / "all.jsonl", processes=processes)
    assert records(tmp_path / "some.jsonl").keys() == records(tmp_path / "all.jsonl").keys()


@pytest.mark.parametrize("processes", [0, 2])
def test_unfinished_answers_are_dropped_at_the_time_limit(processes, tmp_path, monkeypatch):
    write_prompts(tmp_path / "p.jsonl")
    clock = itertools.count()

    def check(self):
        if next(clock) == 60:
            raise regeneration._TimeOver

    monkeypatch.setattr(regeneration._Run, "_check_time", check)
    report = run(tmp_path / "some.jsonl", processes=processes, max_seconds=1e9)
    found = records(tmp_path / "some.jsonl")
    assert 5 < len(found) == report.conversations < 58
    for record in found.values():
        assert len(record["messages"]) == 2 * len(record["turns_ids"])
        assert record["messages"][-1]["role"] == "assistant"
    monkeypatch.undo()
    run(tmp_path / "some.jsonl", processes=processes)
    run(tmp_path / "all.jsonl", processes=processes)
    assert records(tmp_path / "some.jsonl").keys() == records(tmp_path / "all.jsonl").keys()


def test_run_ends_soon_after_the_time_limit(tmp_path):
    class Slow(StreamGenerator):
        def answer(self, *args):
            time.sleep(0.05)
            return super().answer(*args)

    write_prompts(tmp_path / "p.jsonl")
    began = time.monotonic()
    report = run(tmp_path / "o.jsonl", Slow, processes=0, max_seconds=0.2)
    assert time.monotonic() - began < 2.0  # all answers would take 5 s
    assert report.answers < 20


def test_worker_processes_give_the_same_answers(tmp_path):
    write_prompts(tmp_path / "p.jsonl")
    report = run(tmp_path / "beside.jsonl", processes=2, self_prompted=9)
    alone = run(tmp_path / "alone.jsonl", processes=0, self_prompted=9)
    done = records(tmp_path / "beside.jsonl")
    assert done == records(tmp_path / "alone.jsonl")
    num_turns = [len(record["turns_ids"]) for record in done.values()]
    assert set(num_turns) == {1, 2, 3}
    assert (report.conversations, report.answers, report.too_long) == (68, sum(num_turns), 1)
    assert 0 < report.looping < report.answers
    assert 0 < report.warm_up_seconds < report.seconds
    assert report.tokens_per_second < report.warm_tokens_per_second
    counts = [(r.answers, r.answer_tokens, r.looping, r.cut_off, r.too_long, r.self_rejected) for r in (report, alone)]
    assert counts[0] == counts[1]


def test_interrupted_run_keeps_every_answer_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_SETTLING", 2)  # the faster generator must wait without losing answers
    write_prompts(tmp_path / "p.jsonl")
    out = tmp_path / "o.jsonl"
    stopped = StreamGenerator(chat_tokenizer(), stop_after=50)
    with pytest.raises(KeyboardInterrupt):
        run(out, stopped, processes=1)
    begun = records(out)
    # 50 answers complete at least 16 conversations: none has more than three turns.
    assert 16 <= len(begun) < 59
    run(out, processes=0)
    run(tmp_path / "whole.jsonl", processes=0)
    assert records(out) == records(tmp_path / "whole.jsonl")


def test_killed_run_resumes_and_leaves_no_worker(tmp_path):
    write_prompts(tmp_path / "p.jsonl")
    out = tmp_path / "o.jsonl"
    script = f"""
        import os, signal
        from pathlib import Path
        from tests.training.chat import chat_tokenizer
        from tests.training.test_workers import StreamGenerator, run

        def die():
            while not os.path.getsize({str(out)!r}):
                pass
            os.kill(os.getpid(), signal.SIGKILL)

        run(Path({str(out)!r}), StreamGenerator(chat_tokenizer(), stop_after=60, stop=die), processes=1)
    """
    # No main guard, on purpose. A worker that kept running would hold standard error open, and this call would not return.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, env=environment, timeout=120, cwd=ROOT
    )
    assert killed.returncode == -9, killed.stderr
    with out.open() as file:
        begun = file.read().count("\n")
    assert 0 < begun < 59
    run(out, processes=0)
    run(tmp_path / "whole.jsonl", processes=0)
    assert records(out) == records(tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    ("failure", "message"),
    [("raise", "a worker process failed: RuntimeError: cannot be decoded"), ("die", "exit status 7")],
)
def test_worker_error_is_reported_in_one_line(tmp_path, failure, message):
    write_prompts(tmp_path / "p.jsonl", last=failure)
    tokenizer = failing_tokenizer()
    with pytest.raises(WorkerError, match=message) as told:
        run(tmp_path / "o.jsonl", StreamGenerator(tokenizer), tokenizer, processes=1)
    assert "\n" not in str(told.value)


def test_worker_that_cannot_start_is_reported(tmp_path, monkeypatch):
    write_prompts(tmp_path / "p.jsonl")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="exit status 1"):
        run(tmp_path / "o.jsonl", processes=2)


def test_workers_start_only_for_enough_work():
    work = HostWork(chat_tokenizer(), 1000)
    assert isinstance(find_workers(work, 999, 2048, None), Here)
    assert isinstance(find_workers(work, 100_000, 64, None), Here)
    assert isinstance(find_workers(work, 100_000, 2048, 0), Here)
    many = find_workers(work, 100_000, 2048, None)
    assert isinstance(many, Processes)
    many.close()


def test_refusals_are_returned_from_workers(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi", "system": "S"}\n{"prompt": "Hi"}\n')
    report = run(tmp_path / "o.jsonl", tokenizer=chat_tokenizer(INSTRUCT), processes=1)
    assert (report.refused, report.conversations) == (1, 1)
