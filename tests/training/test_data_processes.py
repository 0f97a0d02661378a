"""Reading chat files with several processes gives the same samples, counts and errors as with one."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fledge.tokenizer import Tokenizer
from fledge.training.data import chat_files
from fledge.training.data import loading as data
from fledge.training.data.chat_files import DataError, read_lines
from fledge.training.data.loading import load_samples
from fledge.training.data.samples import Sample, SampleSet
from fledge.training.data.templates import Augmentation
from fledge.training.data.workers import WorkerError
from tests.training.chat import CHATML, assistant, chat_tokenizer, system, user

# This template refuses one of the system prompts in the files below.
PICKY = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this one') }}{% endif %}" + CHATML
VARIED = Augmentation(template_probability=0.3, no_template_probability=0.1, system_probability=0.3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chat_files, "BLOCK_BYTES", 600)


def chat_lines(count: int, start: int = 0) -> list[str]:
    """Lines of every kind: with and without ids, two conversations in one, looping, refused, empty, long; also blank lines."""
    lines = []
    for n in range(start, start + count):
        messages = [user(f"Number {n}?"), assistant(f"It is {n}, I am sure."), user("And?"), assistant(f"{n + 1}!")]
        turns = [{"prompt_ids": [5, n % 300], "answer_ids": [70, n % 300, 2]}]
        turns.append({"prompt_ids": [5, n % 300, 70, n % 300, 2, 9], "answer_ids": [80, 81, 2]})
        if n % 7 == 3:
            turns[1]["prompt_ids"][0] = 6  # rewritten: the line is two conversations
        line = {"messages": messages, "turns_ids": turns}
        if n % 5 == 1:
            del line["turns_ids"]
        if n % 11 == 2:
            line = {"messages": [user("Go on"), assistant("and so on " * 60)]}
        if n % 11 == 5:
            line = {"messages": [system("no"), *messages]}
        if n % 11 == 7:
            line = {"messages": messages[:1]}
        if n % 11 == 9:
            line = {"prompt_ids": [1] * 90, "answer_ids": [2, 3]}
        lines.append(json.dumps(line) + "\n" * (1 + (n % 13 == 0)))
    return lines


def write(folder: Path, lines: list[str]) -> list[Path]:
    """Writes a plain file, partly with Windows line ends, and a gzip file."""
    half = len(lines) // 2
    plain, packed = folder / "a.jsonl", folder / "b.jsonl.gz"
    plain.write_bytes("".join(lines[: half // 2]).replace("\n", "\r\n").encode() + "".join(lines[half // 2 : half]).encode())
    packed.write_bytes(gzip.compress("".join(lines[half:]).encode()))
    return [plain, packed]


def outcome(paths: list[Path], processes: int, **options) -> object:
    """Everything that the caller gets: the samples and the report, or the error message."""
    try:
        samples, report = load_samples(paths, chat_tokenizer(PICKY), max_length=80, processes=processes, **options)
    except DataError as error:
        return str(error)
    return samples.tokens.tolist(), samples.loss_mask.tolist(), samples.offsets.tolist(), report


def test_processes_give_same_result_as_one(tmp_path):
    paths = write(tmp_path, chat_lines(120))
    options = {"augmentation": VARIED, "long": "drop"}
    alone = outcome(paths, 0, **options)
    report = alone[3]
    assert report.conversations > 120
    counts = (report.looping, report.empty, report.refused, report.too_long_dropped, report.augmented, report.not_augmented)
    assert all(counts)
    assert "a.jsonl, line" in report.first_refusal
    assert outcome(paths, 3, **options) == alone
    assert len(list(chat_files.read_blocks(paths[0]))) > 10
    # The limit is reached within a line (of two conversations) or within a file.
    two = next(n for n, conversation in enumerate(chat_files.read_conversations(paths[0])) if conversation.turns[1:] == ())
    for limit in (two + 1, 40):
        assert outcome(paths, 2, limit=limit, **options) == outcome(paths, 0, limit=limit, **options)


BAD = {
    "not JSON": "{",
    "not UTF-8": None,
    "not ids": '{"prompt_ids": [1], "answer_ids": [2, true]}',
    "too large for an id": '{"prompt_ids": [1], "answer_ids": [2, 9999999999]}',
    "of another model": '{"prompt_ids": [1], "answer_ids": [2, 9999]}',
}


@pytest.mark.parametrize("kind", BAD)
def test_first_error_is_reported_with_its_line(tmp_path, kind):
    lines = chat_lines(60)
    path = tmp_path / "a.jsonl"
    encoded = [line.encode() for line in lines]
    bad = BAD[kind].encode() if BAD[kind] else b'{"messages": "\xff"}'
    encoded[40:40] = [bad + b"\n"]
    encoded[45:45] = [b"{ a later one\n"]
    path.write_bytes(b"".join(encoded))
    number = b"".join(encoded[:40]).count(b"\n") + 1
    alone = outcome([path], 0)
    assert f"a.jsonl, line {number}: " in alone
    assert outcome([path], 0, limit=20) != alone
    if kind in ("not JSON", "of another model"):  # one error found while reading, one while making samples
        assert outcome([path], 2) == alone


def test_unreadable_files_are_reported_in_order(tmp_path):
    paths = write(tmp_path, chat_lines(40))
    missing = outcome([*paths, tmp_path / "none.jsonl"], 0)
    assert missing == f"{tmp_path / 'none.jsonl'}: there is no such file" == outcome([*paths, tmp_path / "none.jsonl"], 2)
    paths[1].write_bytes(paths[1].read_bytes()[:-12])
    paths[0].write_text("{\n")
    assert "b.jsonl.gz, after line" in outcome(paths[1:], 0)
    assert "a.jsonl, line 1: not JSON" in outcome(paths, 1)  # the first error in reading order


def test_lines_are_numbered_across_blocks(tmp_path):
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "x" * 2000})
    path.write_bytes(b"\n".join([b'{"n": 1}\r{"n": 2}\r\n', *[b'{"n": 4}'] * 200, long.encode(), b'{"n": 205}']))
    found = list(read_lines(path))
    assert [where for where, _ in found] == [f"{path}, line {n}" for n in (1, 2, *range(4, 206))]
    assert found[-1][1] == {"n": 205}


class Fatal(Tokenizer):
    """Ends its process when a certain text is encoded."""

    def encode(self, text, add_special_tokens=True):
        if "Number 30?" in text:
            os._exit(7)
        return super().encode(text, add_special_tokens)


def test_worker_that_dies_is_reported(tmp_path):
    fatal = Fatal.__new__(Fatal)
    fatal.__dict__ = chat_tokenizer().__dict__
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": [user(f"Number {n}?"), assistant("Yes.")]}) + "\n" for n in range(60)))
    with pytest.raises(WorkerError, match="exit status 7"):
        load_samples(path, fatal, processes=2)


def test_number_of_processes_depends_on_file_size(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "num_cores", lambda: 12)
    path = tmp_path / "a.jsonl"
    path.touch()
    assert data._num_processes([path], None) == 0
    with path.open("wb") as file:
        file.truncate(data.MIN_BYTES_FOR_PROCESSES)  # a sparse file, uses no disk space
    assert data._num_processes([path], None) == 12
    assert data._num_processes([path], 1000) == 0
    assert data._num_processes([path, tmp_path / "none.jsonl"], 1_000_000) == 12
    monkeypatch.setattr(data, "num_cores", lambda: 1)
    assert data._num_processes([path], None) == 0


def test_workers_that_cannot_start_are_reported(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(chat_lines(40)))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="exit status 1"):
        load_samples(path, chat_tokenizer(), processes=3)


def test_joined_sample_sets_equal_one_set():
    samples = [Sample(np.arange(n, dtype=np.int32), np.arange(n) > 1) for n in (3, 0, 5, 2)]
    whole = SampleSet.from_samples(samples)
    parts = [SampleSet.from_samples(part) for part in (samples[:1], [], samples[1:])]
    joined = SampleSet.joined(parts)
    for name in ("tokens", "loss_mask", "offsets", "prompt_keys"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name))
        assert getattr(joined, name).dtype == getattr(whole, name).dtype
    assert len(SampleSet.joined([])) == 0
