"""Reasoning in answers: items and token counts of /v1/responses, and log-probabilities of visible tokens only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fledge.engine.request import TokenLogprob
from fledge.sampling import SamplingParams
from fledge.serving.answers import CompletionLogprobs, chat_logprobs, visible_logprobs
from fledge.serving.chat import ChoiceReader
from fledge.serving.generation import Answer, Progress, Work
from fledge.serving.message import MessageParser
from fledge.serving.protocol import ChatRequest, ResponsesRequest
from fledge.serving.reasoning import DeepSeekR1, Qwen3
from fledge.serving.responses import Response
from fledge.tokenizer import Tokenizer
from tests.serving.model_folder import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer(folder)


def progress_of(tokenizer: Tokenizer, text: str, size: int, reason: str = "length", **params: Any) -> list[Progress]:
    """The progress of an answer with this text. `size`: tokens per step."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    answer = Answer(0, Work([5], SamplingParams(**params)), tokenizer, 0.0)
    steps = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    answer.num_tokens, answer.finish_reason = len(tokens), reason
    return [
        Progress(
            answer,
            [(answer.decoder.feed(step), False)],
            step,
            [TokenLogprob(token, -0.5, [(token, -0.5)]) for token in step],
            reason if number == len(steps) - 1 else None,
        )
        for number, step in enumerate(steps)
    ]


def fake_call(tokenizer: Tokenizer, parser: MessageParser, **payload: Any) -> Any:
    return SimpleNamespace(
        new_parser=lambda: parser,
        service=SimpleNamespace(tokenizer=tokenizer),
        payload=ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]} | payload),
        works=[Work([5], SamplingParams())],
        prompt=[5],
        model="tiny",
        created=1,
    )


THOUGHT, SAID = "the quick brown fox", "the lazy dog"


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_response_has_an_item_for_the_reasoning(tokenizer: Tokenizer, size: int, reason: str) -> None:
    text = f"{THOUGHT}</think>\n\n{SAID}"
    response = Response(ResponsesRequest(input="a"), fake_call(tokenizer, MessageParser(DeepSeekR1(""))))
    data = response.begin() + b"".join(map(response.push, progress_of(tokenizer, text, size, reason))) + response.end()
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(one["type"].removeprefix("response.") for one in events if not one["type"].endswith(".delta")))
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    ended = "completed" if reason == "stop" else "incomplete"
    assert kinds == ["created", "in_progress", *item, "reasoning_text.done", *done, "output_text.done", ended]
    body = events[-1]["response"]
    assert [one["type"] for one in body["output"]] == ["reasoning", "message"]
    for index, (name, words) in enumerate((("reasoning_text", THOUGHT), ("output_text", SAID))):
        mine = [one for one in events if one.get("output_index") == index]
        assert "".join(one["delta"] for one in mine if one["type"] == f"response.{name}.delta") == words
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[-1]["item"] == body["output"][index]
        assert {one["item_id"] for one in mine if "item_id" in one} == {body["output"][index]["id"]}
        assert body["output"][index]["content"][0]["text"] == words
    thought_tokens = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert thought_tokens == len(tokenizer.encode(f"{THOUGHT}</think>\n\n", add_special_tokens=False))


def test_a_response_without_reasoning_has_its_message_at_index_0(tokenizer: Tokenizer) -> None:
    response = Response(ResponsesRequest(input="a"), fake_call(tokenizer, MessageParser(Qwen3(""))))
    data = b"".join(map(response.push, progress_of(tokenizer, SAID, 2, "stop"))) + response.end()
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    assert {one["output_index"] for one in events if "output_index" in one} == {0}
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("text", [f"{THOUGHT}</think>\n\n{SAID}", SAID])
def test_log_probabilities_of_hidden_reasoning_are_not_shown(tokenizer: Tokenizer, size: int, text: str) -> None:
    parser = MessageParser((DeepSeekR1 if text != SAID else Qwen3)(""), with_reasoning=False)
    reader = ChoiceReader(fake_call(tokenizer, parser, logprobs=True), parser)
    found = [reader.read(one)[1] for one in progress_of(tokenizer, text, size)]
    shown = [entry for one in found if one is not None for entry in one["content"]]
    assert "".join(entry["token"] for entry in shown) == parser.content == SAID


def test_bytes_and_offsets_of_tokens_that_split_a_character(tokenizer: Tokenizer) -> None:
    text = "a☃b"
    steps = progress_of(tokenizer, text, 2)
    logprobs = [one for step in steps for one in step.logprobs]
    assert len(logprobs) == 5, "each byte of the snowman is a token"
    assert bytes(byte for entry in chat_logprobs(tokenizer, logprobs)["content"] for byte in entry["bytes"]) == text.encode()
    reader = CompletionLogprobs(tokenizer, True, 10)
    found = [reader.read(step.logprobs) for step in steps]
    assert [offset for one in found for offset in one["text_offset"]] == [10, 11, 11, 11, 12]


def test_spaces_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁thecat",
        "th",
        "the",
        "▁the",
        "ca",
        "cat",
        "▁cat",
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat")]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    steps = progress_of(tokenizer, "the cat é the", 2)
    logprobs = [one for step in steps for one in step.logprobs]
    content = chat_logprobs(tokenizer, logprobs)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == " the cat é the"
    assert [entry["token"] for entry in content][:2] == [" the", " cat"]
    reader = CompletionLogprobs(tokenizer, True, 0)
    offsets = [offset for step in steps for offset in reader.read(step.logprobs)["text_offset"]]
    assert offsets == [0, 3, 7, 8, 8, 9]


def test_a_stop_token_that_is_shown_has_its_log_probability(tokenizer: Tokenizer) -> None:
    for include, stop_reason, expected in ((True, 7, 3), (False, 7, 2), (True, None, 2)):
        (step,) = progress_of(tokenizer, "abc", 100, "stop", include_stop_str_in_output=include)
        step.answer.stop_reason = stop_reason
        assert len(visible_logprobs(step)) == expected
