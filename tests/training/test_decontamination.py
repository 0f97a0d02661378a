"""Decontamination: evaluation prompts are kept out of the training data."""

from __future__ import annotations

import json

import pytest

from fledge.training.data.chat_files import DataError, Decontamination
from fledge.training.data.loading import load_samples
from fledge.training.datagen.regenerate import regenerate
from tests.training.chat import assistant, chat_tokenizer, user
from tests.training.test_regenerate import EchoGenerator

QUESTION = "Write a function that takes a list of words and returns the longest one of them, please."
REWORDED = "please WRITE a function, that takes a list of words and returns the longest one of them: thanks"
OTHER = "Write a function that takes a list of numbers and gives back the smallest of all of them."


def file_of(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_common_word_runs_are_overlap():
    kept_out = Decontamination([QUESTION, "What is the capital of France?"])
    assert kept_out.has([REWORDED])
    assert kept_out.has(["unrelated", "Here: " + QUESTION])
    assert kept_out.has(["what is the capital of france"])
    assert not kept_out.has([OTHER])
    # Short prompts must match as a whole.
    assert not kept_out.has(["What is the capital of France, and how many people live there in all?"])


def test_common_phrases_are_no_overlap():
    assert not Decontamination(["Thank you!"]).has(["Thank you!"])


CHINESE = "请你用中文详细解释一下光合作用的基本过程以及它对地球生态系统的重要意义"
JAPANESE = "二つの整数を受け取り、その最大公約数を返す関数をできるだけ短く書いてください。"


def test_scripts_without_spaces_are_compared_by_characters():
    kept_out = Decontamination([CHINESE, JAPANESE, "水的化学式到底是什么呢？"])
    for text in (CHINESE, f"Here is one: {CHINESE}。谢谢！", JAPANESE.replace("、", " "), "水的化学式到底是什么呢"):
        assert kept_out.has([text]), text
    for text in (
        "请你用中文详细解释一下什么是黑洞，以及人们怎样观测它",
        "水的化学式到底是什么呢？谁发现的？",
        "谢谢",
    ):
        assert not kept_out.has([text]), text


def test_evaluation_prompts_are_left_out_of_training_data(tmp_path):
    evaluation = file_of(tmp_path / "eval.jsonl", {"turns": [QUESTION]})
    chats = [{"messages": [user(text), assistant("Sure.")]} for text in (REWORDED, OTHER, "Hello there!")]
    data = file_of(tmp_path / "data.jsonl", *chats)
    samples, report = load_samples(data, chat_tokenizer(), decontaminate=[evaluation], cache_dir=tmp_path / "cache")
    assert (len(samples), report.contaminated, report.conversations) == (2, 1, 3)
    assert "1 left out for overlap with the evaluation" in str(report)
    everything, _ = load_samples(data, chat_tokenizer(), cache_dir=tmp_path / "cache")
    assert len(everything) == 3  # the cache entry depends on the setting
    again, report = load_samples(data, chat_tokenizer(), decontaminate=[evaluation], cache_dir=tmp_path / "cache")
    assert (len(again), report.contaminated) == (2, 1)


def test_tokenised_conversations_are_read_too(tmp_path):
    tokenizer = chat_tokenizer()
    evaluation = file_of(tmp_path / "eval.jsonl", {"prompt": QUESTION})
    turns = [{"prompt_ids": tokenizer.encode(text), "answer_ids": tokenizer.encode("Sure.")} for text in (QUESTION, OTHER)]
    _, report = load_samples(file_of(tmp_path / "data.jsonl", *turns), tokenizer, decontaminate=[evaluation])
    assert (report.kept, report.contaminated) == (1, 1)


def test_prompts_of_the_evaluation_are_not_answered(tmp_path):
    evaluation = file_of(tmp_path / "eval.jsonl", {"messages": [user(QUESTION)]})
    prompts = file_of(tmp_path / "prompts.jsonl", {"turns": [OTHER]}, {"turns": ["Hi there.", REWORDED]})
    out = tmp_path / "answers.jsonl"
    tokenizer = chat_tokenizer()
    report = regenerate(EchoGenerator(tokenizer), tokenizer, prompts, out, decontaminate=[evaluation])
    assert (report.conversations, report.contaminated, report.settled) == (1, 1, 2)
    assert REWORDED not in out.read_text()


def test_a_file_without_prompts_is_named(tmp_path):
    with pytest.raises(DataError, match=r"eval.jsonl, line 1: needs"):
        Decontamination.of_files([file_of(tmp_path / "eval.jsonl", {"text": "no prompt"})])
