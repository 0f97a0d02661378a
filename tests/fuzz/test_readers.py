"""Readers of untrusted input: any input gives a result or the reader's own error, in bounded time and memory.

The default number of examples is small; `FLEDGE_FUZZ_EXAMPLES=100000 pytest tests/fuzz` runs longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fledge.bench.conform_client import Broken, _streamed, _whole
from fledge.bench.load_client import read_stream
from fledge.checkpoints import gguf
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.gguf_tokenizer import GgufTokenizer
from fledge.checkpoints.hf import config_to_hf, load_config, save_decoder
from fledge.checkpoints.tensors import TensorReader
from fledge.config import ModelConfig
from fledge.engine.stop_strings import StopMatcher
from fledge.errors import RequestError, UserError
from fledge.families import FAMILIES as SUPPORTED
from fledge.serving.json_schema import supported_schema
from fledge.serving.limits import Limits, check_json
from fledge.serving.message import MessageParser
from fledge.serving.reasoning import REASONING_PARSERS
from fledge.serving.tool_parsers import TOOL_PARSERS
from fledge.serving.tool_parsers.forced import RequiredParser, required_schema
from tests.checkpoints.gguf_files import write_gguf
from tests.serving.model_folder import make_tokenizer
from tests.tiny import tiny_decoder, tiny_model_config

EXAMPLES = int(os.environ.get("FLEDGE_FUZZ_EXAMPLES", "0"))


def bounded(examples: int) -> settings:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=EXAMPLES or examples, deadline=None, suppress_health_check=health, derandomize=not EXAMPLES)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)

# Files

LENGTHS = [b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 60)]


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    decoder = tiny_decoder(vocab_size=288, num_layers=1)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", decoder, "llama").read_bytes()


@bounded(60)
@given(data=st.data())
def test_gguf_headers(gguf_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """A valid file with some bytes of its header changed, or truncated."""
    changed = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 3000))
        piece = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from(LENGTHS))
        changed[at : at + len(piece)] = piece
    cut = data.draw(st.integers(0, len(changed)) | st.just(len(changed)))
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(changed[:cut]))
    try:
        opened = GgufFile(file)
        gguf.read_config(opened)
        GgufTokenizer(opened)
    except UserError:
        pass


@bounded(150)
@given(body=st.binary(max_size=400))
def test_gguf_random_bytes(tmp_path: Path, body: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + body)
    with contextlib.suppress(UserError):
        GgufFile(file)


HEADERS = st.dictionaries(
    st.text(max_size=8),
    JSON
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "I64", "X"]) | SCALARS,
            "shape": st.lists(st.integers(-1, 1 << 62), max_size=3) | SCALARS,
            "data_offsets": st.lists(st.integers(-1, 1 << 62), max_size=3) | SCALARS,
        }
    ),
    max_size=3,
)


@bounded(120)
@given(header=HEADERS, length=st.none() | st.integers(0, (1 << 64) - 1), body=st.binary(max_size=32))
def test_safetensors_headers(tmp_path: Path, header: dict[str, Any], length: int | None, body: bytes) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    try:
        with TensorReader(tmp_path) as reader:
            for name in reader.shapes:
                reader.read(name)
    except UserError:
        pass


# Configurations


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = save_decoder(tiny_decoder(), tmp_path_factory.mktemp("model"))
    experts = config_to_hf(tiny_model_config("Qwen2MoeForCausalLM")) | {"num_local_experts": 4}
    return experts | json.loads((folder / "config.json").read_text())


KEYS = [
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "eos_token_id", "bos_token_id", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "hidden_act",
    "quantization_config", "partial_rotary_factor", "original_max_position_embeddings", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "mlp_only_layers",
    "decoder_sparse_step", "hidden_activation", "query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq",
]  # fmt: skip
ROPE_KEYS = [
    "rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "attention_factor",
]  # fmt: skip
ROPE_VALUES = SCALARS | st.sampled_from(["yarn", "llama3", "linear", "dynamic", "longrope", [1.0], [1.0] * 4])
ROPE = st.dictionaries(st.sampled_from(ROPE_KEYS), ROPE_VALUES, max_size=5)
CHANGES = st.dictionaries(st.sampled_from(KEYS), JSON | ROPE | st.integers(-2, 1 << 40), min_size=1, max_size=4)
FAMILIES = st.sampled_from(list(SUPPORTED))


@bounded(400)
@given(changes=CHANGES, family=FAMILIES)
def test_model_configurations(config: dict[str, Any], changes: dict[str, Any], family: str) -> None:
    try:
        made = ModelConfig.from_hf(config | {"architectures": [family]} | changes)
    except UserError:
        return
    assert made.num_layers <= 1024
    assert made.num_heads % made.num_kv_heads == 0
    assert made.head_dim <= 1024
    assert all(0 <= end < made.vocab_size for end in made.eos_token_ids)
    assert len(made.windows) == made.num_layers


@bounded(60)
@given(content=JSON, generation=JSON)
def test_config_files(tmp_path: Path, content: Any, generation: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    with pytest.raises(UserError):
        load_config(tmp_path)


DRAFTER_KEYS = [*KEYS, "eagle_config", "draft_vocab_size", "target_hidden_size", "fc_norm", "num_aux_hidden_states"]
DRAFTER_KEYS += ["eagle_aux_hidden_state_layer_ids"]
DRAFTER_VALUES = JSON | ROPE | st.integers(-2, 1 << 40)


@bounded(60)
@given(changes=st.dictionaries(st.sampled_from(DRAFTER_KEYS), DRAFTER_VALUES, min_size=1, max_size=3))
def test_drafter_configurations(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    folder = _drafter(tmp_path_factory)
    true = json.loads((folder / "true.json").read_text())
    (folder / "config.json").write_text(json.dumps(true | changes))
    with contextlib.suppress(UserError):
        load_drafter(folder)


_DRAFTER: list[Path] = []


def _drafter(factory: pytest.TempPathFactory) -> Path:
    from fledge.checkpoints.eagle3 import save_drafter
    from tests.tiny import tiny_drafter

    if not _DRAFTER:
        folder = save_drafter(tiny_drafter(), factory.mktemp("drafter") / "tiny")
        (folder / "true.json").write_text((folder / "config.json").read_text())
        _DRAFTER.append(folder)
    return _DRAFTER[0]


# Text that a model generates

MARKERS = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}}", "<think>", "</think>", "<|python_tag|>", "[f(a=1)",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    '"', "\\", "{", "}", "(", ")", ",", '"name"', ":", "null", "\ud7ff", "\x00", "[" * 50, "9" * 20, "a=b", "]",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(MARKERS) | st.text(max_size=6), max_size=16)


@pytest.mark.parametrize("name", [*sorted(TOOL_PARSERS), "required"])
@bounded(150)
@given(pieces=TEXTS, reasoning=st.none() | st.sampled_from(sorted(REASONING_PARSERS)))
def test_tool_parsers(name: str, pieces: list[str], reasoning: str | None) -> None:
    """The parsed message does not depend on how the text is split, and nothing raises."""

    def read(parts: list[str]) -> dict[str, Any]:
        tools = RequiredParser() if name == "required" else TOOL_PARSERS[name]()
        parser = MessageParser(REASONING_PARSERS[reasoning]("") if reasoning else None, tools)
        for part in parts:
            parser.push(part)
        parser.finish()
        message = parser.message()
        for call in message.get("tool_calls") or ():
            call.pop("id")
        return message

    assert read(pieces) == read(["".join(pieces)])


@bounded(200)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5), pieces=st.lists(st.text("abc", max_size=5))
)
def test_stop_strings(stops: list[str], pieces: list[str]) -> None:
    matcher, text = StopMatcher(tuple(stops)), ""
    for piece in pieces:
        text += piece
        found = matcher.push(piece)
        assert (found is not None) == any(stop in text for stop in stops)
        if found is not None:
            assert text[: found.end].endswith(found.stop)
            return


# Grammars and JSON


@bounded(200)
@given(data=JSON)
def test_json_checks(data: Any) -> None:
    try:
        check_json(data, Limits(max_json_depth=4, max_json_items=12))
    except RequestError:
        return
    json.dumps(data, allow_nan=False).encode()


@bounded(100)
@given(
    parameters=st.dictionaries(st.sampled_from(["$defs", "type", "properties", "$ref"]), JSON, max_size=3),
    parallel=st.booleans(),
)
def test_forced_calls(parameters: dict[str, Any], parallel: bool) -> None:
    with contextlib.suppress(UserError):
        json.dumps(required_schema([("f", parameters)], parallel))


EVENT_KEYS = ["choices", "delta", "content", "usage", "completion_tokens", "tool_calls", "function", "name", "error", "index"]
EVENTS = st.recursive(
    JSON,
    lambda inner: st.dictionaries(st.sampled_from(EVENT_KEYS), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@bounded(300)
@given(events=st.lists(EVENTS, max_size=3), cut=st.integers(1, 40), junk=st.binary(max_size=10))
def test_streams_of_other_servers(events: list[Any], cut: int, junk: bytes) -> None:
    """`bench-serve` and `conform` count an invalid event as an error of that request."""
    data = junk + b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    sample = read_stream(0.0, [(1.0, data[at : at + cut]) for at in range(0, len(data), cut)])
    assert sample.error is not None, "there is no [DONE]"
    with contextlib.suppress(Broken):
        _streamed(data.decode(errors="replace").splitlines())
    for event in events:
        with contextlib.suppress(Broken):
            _whole(event)


SCHEMA_KEYS = [
    "type", "properties", "items", "required", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "pattern", "minLength",
    "maxItems", "additionalProperties", "format",
]  # fmt: skip
SCHEMAS = st.dictionaries(
    st.sampled_from(SCHEMA_KEYS),
    JSON | st.sampled_from(["object", "array", "string", "integer", "#", "#/$defs/a"]),
    max_size=4,
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("xgrammar")
    from fledge.serving.structured import GrammarCompiler
    from fledge.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    tokenizer = Tokenizer(folder)
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2], Limits(max_grammar_seconds=2.0))
    yield made
    made.close()


@bounded(40)
@given(
    kind=st.sampled_from(["json_schema", "regex", "ebnf", "choice"]),
    schema=SCHEMAS,
    text=st.text("ab[](){}|*+?.^$\\d,019\"':=r ot\n", max_size=30),
)
def test_grammars(compiler, kind: str, schema: dict[str, Any], text: str) -> None:
    """xgrammar runs in the compiler process: even if it crashes there, the server answers the request."""
    given_text = {"json_schema": schema, "regex": text, "ebnf": f"root ::= {text}", "choice": [text]}[kind]
    try:
        if kind == "json_schema" and schema:
            given_text = supported_schema(schema)
        grammar = getattr(compiler, kind)(given_text)
    except RequestError:
        return
    assert compiler.processor(grammar).failure is None
