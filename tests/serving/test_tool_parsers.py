"""Every tool-call format is parsed to the same calls, however its text is split."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import pytest

from fledge.serving.json_schema import supported_schema
from fledge.serving.message import MessageParser
from fledge.serving.tool_parsers import TOOL_PARSERS
from fledge.serving.tool_parsers.forced import NamedParser, RequiredParser, required_schema
from fledge.serving.tool_parsers.tagged_formats import typed

WEATHER = ("get_weather", {"city": 'Paris, "France" }{ é', "days": 3, "nested": {"a": [1, {"b": "]"}]}})
CLOCK = ("now", {})


def as_json(name: str, arguments: dict, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def kimi(name: str, arguments: dict, index: int) -> str:
    return f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"


def coder(name: str, arguments: dict) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inside = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<function={name}>\n{inside}</function>"


FUNCTIONS = {"get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "nested": {}}}}

# format, text, content, calls
CASES = [
    ("hermes", f"<tool_call>\n{as_json(*WEATHER)}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"Let me look. <tool_call>{as_json(*WEATHER)}</tool_call>\n<tool_call>{as_json(*CLOCK)}</tool_call>",
     "Let me look. ", [WEATHER, CLOCK]),
    ("hermes", f'<tool_call>{{"arguments": {json.dumps(WEATHER[1])}, "name": "get_weather"}}</tool_call>', "", [WEATHER]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [CLOCK]),
    ("hermes", '<tool_call>{"name": "now", "id": 3, "arguments": null}</tool_call>', "", [CLOCK]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", "2 < 3 and <tool is no call", "2 < 3 and <tool is no call", []),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("hermes", "plain answer", "plain answer", []),
    ("llama3_json", as_json(*WEATHER, "parameters"), "", [WEATHER]),
    ("llama3_json", f"<|python_tag|>{as_json(*WEATHER, 'parameters')}; {as_json(*CLOCK, 'parameters')}", "", [WEATHER, CLOCK]),
    ("llama3_json", "\n " + as_json(*WEATHER), "", [WEATHER]),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", "{no json", "{no json", []),
    ("llama3_json", "plain answer", "plain answer", []),
    ("pythonic", "[get_weather(city='Paris, \"France\" }{ é', days=3, nested={'a': [1, {'b': ']'}]}), now()]",
     "", [WEATHER, CLOCK]),
    ("pythonic", '[f(x=-1.5, y=True, z=None, s="it\'s (a) \\"test\\"")]',
     "", [("f", {"x": -1.5, "y": True, "z": None, "s": "it's (a) \"test\""})]),
    ("pythonic", "[1] is a reference", "[1] is a reference", []),
    ("pythonic", "plain answer", "plain answer", []),
    ("kimi_k2", f"Hm.<|tool_calls_section_begin|>{kimi(*WEATHER, 0)}{kimi(*CLOCK, 1)}<|tool_calls_section_end|>",
     "Hm.", [WEATHER, CLOCK]),
    ("kimi_k2", "a < b <| c", "a < b <| c", []),
    ("mistral", f"Hm. [TOOL_CALLS][{as_json(*WEATHER)}, {as_json(*CLOCK)}]", "Hm. ", [WEATHER, CLOCK]),
    ("mistral", f"[TOOL_CALLS]get_weather{json.dumps(WEATHER[1])}[TOOL_CALLS]now{{}}", "", [WEATHER, CLOCK]),
    ("mistral", f"[TOOL_CALLS] get_weather[CALL_ID]a1[ARGS]{json.dumps(WEATHER[1])}", "", [WEATHER]),
    ("mistral", "[TOOL] is no mark [", "[TOOL] is no mark [", []),
    ("phi4_mini_json", f"functools[{as_json(*WEATHER)}, {as_json(*CLOCK)}]", "", [WEATHER, CLOCK]),
    ("phi4_mini_json", "functools are nice", "functools are nice", []),
    ("qwen3_coder", f"I look.\n<tool_call>\n{coder(*WEATHER)}\n</tool_call>\n<tool_call>\n{coder(*CLOCK)}\n</tool_call>",
     "I look.\n", [WEATHER, CLOCK]),
    ("qwen3_coder", coder(*WEATHER), "", [WEATHER]),
    ("qwen3_coder", "a < b <tool_c", "a < b <tool_c", []),
    ("qwen3_xml", f"<tool_call>{coder(*CLOCK)}{coder(*WEATHER)}</tool_call>", "", [CLOCK, WEATHER]),
]  # fmt: skip


def pieces(text: str, seed: int) -> list[str]:
    """Splits a text. `seed`: 0 leaves it whole, 1 splits it into characters, others into random pieces."""
    if seed == 0:
        return [text]
    chance = random.Random(seed)
    result = []
    while text:
        size = 1 if seed == 1 else chance.randint(1, 12)
        result.append(text[:size])
        text = text[size:]
    return result


def parsed(parser: MessageParser, parts: list[str]) -> tuple[dict, dict]:
    """Returns the message, and the same assembled from the stream's deltas as a client would."""
    content, calls = "", {}
    deltas = [delta for part in parts for delta in parser.push(part)] + parser.finish()
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"name": "", "arguments": "", "id": call.get("id")})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"].get("arguments", "")
    return parser.message(), {"content": content, "calls": [calls[index] for index in sorted(calls)]}


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_calls_are_parsed_from_any_pieces(style: str, text: str, content: str, calls: list, seed: int) -> None:
    parser = TOOL_PARSERS[style]()
    parser.functions = FUNCTIONS
    message, streamed = parsed(MessageParser(tools=parser), pieces(text, seed))
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
    assert found == calls
    assert (message["content"] or "") == content == streamed["content"]
    assert [(call["name"], json.loads(call["arguments"])) for call in streamed["calls"]] == calls
    assert len({call["id"] for call in streamed["calls"]}) == len(calls)


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = TOOL_PARSERS["hermes"]()
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "a long ')
    events = parser.push("text")
    assert [event.text for event in events] == ["text"]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", None, "3"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"a": 1}', {"anyOf": [{"type": "object"}]}, {"a": 1}),
    ],
)
def test_text_values_are_converted_to_the_schemas_type(text: str, schema: object, value: object) -> None:
    assert typed(text, schema) == value


def test_kimi_call_ids_are_kept() -> None:
    text = f"<|tool_calls_section_begin|>{kimi(*CLOCK, 7)}<|tool_calls_section_end|>"
    message, _ = parsed(MessageParser(tools=TOOL_PARSERS["kimi_k2"]()), [text])
    assert message["tool_calls"][0]["id"] == "functions.now:7"


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f", "argu', '<tool_call>{"na', "<tool_ca"])
def test_a_truncated_call_is_content_unless_its_name_is_known(text: str) -> None:
    message, streamed = parsed(MessageParser(tools=TOOL_PARSERS["hermes"]()), [text])
    assert bool(message.get("tool_calls")) == ('"f"' in text)
    assert streamed["content"] == ("" if '"f"' in text else text)


@pytest.mark.parametrize("seed", range(5))
def test_text_after_llama_calls_is_dropped_to_the_end(seed: int) -> None:
    """Also what looks like a call, wherever the text is split."""
    call = '{"name": "f", "arguments": {}}'
    message, _ = parsed(MessageParser(tools=TOOL_PARSERS["llama4_json"]()), pieces(f"{call} and {call}", seed))
    assert len(message["tool_calls"]) == 1
    message, _ = parsed(MessageParser(tools=TOOL_PARSERS["llama4_json"]()), [f"{call} and ", call])
    assert len(message["tool_calls"]) == 1


def test_one_call_at_most_when_parallel_calls_are_off() -> None:
    text = f"<tool_call>{as_json(*WEATHER)}</tool_call><tool_call>{as_json(*CLOCK)}</tool_call>"
    message, streamed = parsed(MessageParser(tools=TOOL_PARSERS["hermes"](), parallel=False), pieces(text, 2))
    assert len(message["tool_calls"]) == len(streamed["calls"]) == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_forced_calls(seed: int) -> None:
    message, _ = parsed(MessageParser(tools=NamedParser("f")), pieces('{"a": 1}', seed))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    text = f"[{as_json(*WEATHER, 'parameters')}, {as_json(*CLOCK, 'parameters')}]"
    message, _ = parsed(MessageParser(tools=RequiredParser()), pieces(text, seed))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]


OBJECT = {"type": "object", "required": ["x"]}
REFERRING = {
    "first": OBJECT | {"properties": {"x": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": {"const": 1}}},
    "second": OBJECT | {"properties": {"x": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": {"const": 2}}},
    "definitions": OBJECT | {"properties": {"x": {"$ref": "#/definitions/Item"}}, "definitions": {"Item": {"const": 3}}},
    "itself": OBJECT | {"properties": {"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    "property": OBJECT | {"properties": {"x": {"$ref": "#/properties/y"}, "y": {"const": 4}}},
    "named": OBJECT | {"$id": "tool", "properties": {"x": {"const": {"$ref": "#/no/reference"}}, "$ref": {"const": 5}}},
}


def test_references_are_resolved_within_each_tools_own_schema() -> None:
    schema = required_schema(list(REFERRING.items()), parallel=False)
    validator = jsonschema_rs.validator_for(schema)
    values = {
        "first": 1,
        "second": 2,
        "definitions": 3,
        "itself": {"x": None},
        "property": 4,
        "named": {"$ref": "#/no/reference"},
    }
    for name in values:
        for given in values:
            call = {"name": name, "parameters": {"x": values[given]}}
            assert validator.is_valid([call]) == (given == name), (name, given)
    assert not validator.is_valid([call, call])
    supported_schema(schema)
    assert REFERRING["first"]["properties"]["x"] == {"$ref": "#/$defs/Item"}  # the caller's schema is not modified
