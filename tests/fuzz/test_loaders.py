"""Untrusted checkpoints are loaded beyond their headers, and our clients read the answers of other servers."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fledge.bench.conform_client import Answer, Broken, Refused, _error, _streamed, _whole
from fledge.bench.load import Acceptance
from fledge.checkpoints import gguf
from fledge.checkpoints.eagle3 import load_drafter, save_drafter
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.inspect import inspect_drafter
from fledge.checkpoints.speculators import save_speculators
from fledge.errors import UserError
from fledge.kernels import native
from tests.checkpoints.gguf_files import write_gguf
from tests.fuzz.test_readers import JSON, LENGTHS, SCALARS, bounded
from tests.tiny import tiny_decoder, tiny_drafter

# GGUF tensors, which are passed to the C kernels


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A quantised GGUF file and the offset of its tensor table."""
    decoder = tiny_decoder(vocab_size=288, num_layers=1, hidden_size=64, intermediate_size=96)
    content = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", decoder, "llama", "Q8_0").read_bytes()
    return content, content.index(b"token_embd.weight") - 8


@pytest.mark.skipif(native.library() is None, reason="no C compiler")
@bounded(80)
@given(data=st.data())
def test_gguf_tensor_tables(quantised: tuple[bytes, int], tmp_path: Path, data: st.DataObject) -> None:
    """Corrupts shapes, formats and offsets of tensors: the file is refused, or the loaded model can run."""
    content, table = quantised
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(table, table + 900))
        piece = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from(LENGTHS) | st.integers(0, 40).map(_word))
        changed[at : at + len(piece)] = piece
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(changed))
    try:
        opened = GgufFile(file)
        decoder = gguf.load_decoder(opened)
    except UserError:
        return
    rows = torch.tensor([0, decoder.config.vocab_size - 1])
    assert decoder.embed(rows).shape == (2, decoder.config.hidden_size)


def _word(number: int) -> bytes:
    return struct.pack("<I", number)


@bounded(40)
@given(data=st.data())
def test_gguf_conversions(quantised: tuple[bytes, int], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content, _ = quantised
    changed = bytearray(content)
    at = data.draw(st.integers(4, 6000))
    piece = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from(LENGTHS))
    changed[at : at + len(piece)] = piece
    folder = tmp_path_factory.mktemp("converted")
    (folder / "model.gguf").write_bytes(bytes(changed))
    with contextlib.suppress(UserError):
        gguf.convert(folder / "model.gguf", folder / "out")


# Drafters


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "raw": save_drafter(tiny_drafter(), folder / "raw"),
        "speculators": save_speculators(tiny_drafter(), folder / "speculators", "some/target"),
    }


@pytest.mark.parametrize("layout", ["raw", "speculators"])
@bounded(50)
@given(data=st.data())
def test_drafter_files(
    drafters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, layout: str, data: st.DataObject
) -> None:
    """Corrupts bytes of the weight file's header and values of the configuration: nothing but `UserError` is raised."""
    source, folder = drafters[layout], tmp_path_factory.mktemp("drafter")
    weights = bytearray((source / "model.safetensors").read_bytes())
    header = struct.unpack("<Q", weights[:8])[0]
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, 7 + header))
        weights[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1) | st.sampled_from([b"9", b"]", b'"']))
    (folder / "model.safetensors").write_bytes(bytes(weights))
    config = json.loads((source / "config.json").read_text())
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=2)):
        config[name] = data.draw(JSON)
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(UserError):
        load_drafter(folder)
    with contextlib.suppress(UserError):
        inspect_drafter(folder).as_dict()


# Answers of servers

LOGPROBS = st.fixed_dictionaries({"token": SCALARS, "logprob": SCALARS})
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(-2, 1 << 40) | SCALARS,
        "text": SCALARS,
        "message": JSON | st.fixed_dictionaries({"content": SCALARS, "tool_calls": JSON | st.lists(JSON, max_size=2)}),
        "delta": JSON | st.fixed_dictionaries({"content": SCALARS}),
        "finish_reason": SCALARS,
        "logprobs": JSON
        | st.fixed_dictionaries(
            {"content": st.lists(st.fixed_dictionaries({"token": SCALARS, "logprob": SCALARS}), max_size=2)}
        ),
    },
)
ANSWERS = JSON | st.fixed_dictionaries({"choices": JSON | st.lists(PARTS, max_size=3)}, optional={"usage": JSON, "error": JSON})


def check(answer: Answer) -> None:
    assert answer.choices
    for choice in answer.choices:
        assert isinstance(choice.text, str)
        assert isinstance(choice.reasoning, str)
        assert all(isinstance(one.logprob, float) and isinstance(one.token, str) for one in choice.logprobs)
    assert isinstance(answer.usage, dict)


@bounded(300)
@given(data=ANSWERS)
def test_whole_answers(data: Any) -> None:
    with contextlib.suppress(Broken):
        check(_whole(data))


LINES = st.lists(
    ANSWERS.map(lambda data: f"data: {json.dumps(data)}") | st.text(max_size=20) | st.just("data: [DONE]"), max_size=4
)


@bounded(300)
@given(lines=LINES)
def test_streamed_answers(lines: list[str]) -> None:
    with contextlib.suppress(Broken):
        check(_streamed(lines))


def test_an_answer_that_is_nested_too_deeply_is_refused() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(Broken):
        _streamed([f"data: {deep}"])
    assert isinstance(_error(400, deep), Refused)


@bounded(200)
@given(status=st.integers(100, 599), text=st.text() | JSON.map(json.dumps))
def test_error_messages_are_short(status: int, text: str) -> None:
    assert len(str(_error(status, text))) < 300


NAMES = ["vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
VALUES = st.floats() | st.text(max_size=5) | st.sampled_from(["+Inf", "NaN", "9" * 400])
SAMPLES = st.tuples(st.sampled_from(NAMES), st.integers(-2, 1 << 70) | st.text(max_size=4), VALUES)


@bounded(200)
@given(samples=st.lists(SAMPLES, max_size=5))
def test_metrics(samples: list[tuple[str, Any, Any]]) -> None:
    """A large `position` label must not make the list of positions that long."""
    seen = Acceptance.parse("\n".join(f'{name}{{position="{position}"}} {value}' for name, position, value in samples))
    assert len(seen.accepted_at) <= 1000
