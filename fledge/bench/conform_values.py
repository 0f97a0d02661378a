"""The schemas and tools that `fledge conform` uses, and checks of values against them."""

from __future__ import annotations

import json
import re
from typing import Any

from fledge.bench.conform_client import Choice

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "note": {"type": "string", "maxLength": 24},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "coastal": {"type": "boolean"},
        "seasons": {
            "type": "array",
            "items": {"type": "string", "enum": ["spring", "summer", "autumn", "winter"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["city", "note", "days", "coastal", "seasons"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TIME_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}},
    "required": ["city"],
    "additionalProperties": False,
}
# The API guarantees that arguments follow the schema only with `strict`.
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": parameters, "strict": True}}
    for name, text, parameters in (
        ("get_weather", "Weather of a city.", PARAMETERS),
        ("get_time", "The local time of a city.", TIME_PARAMETERS),
    )
]


class Failed(Exception):
    """The answer is wrong; the message says how."""


def parse_json(choice: Choice) -> Any:
    try:
        return json.loads(choice.text)
    except ValueError:
        cut = f" (cut off: finish_reason {choice.finish_reason!r})" if choice.finish_reason != "stop" else ""
        raise Failed(f"the answer is not JSON{cut}: {choice.text[:120]!r}") from None


def schema_problem(value: Any, schema: dict[str, Any], place: str = "") -> str:
    """What is wrong with a value, for the few keywords that these schemas use; "" if nothing is."""
    where = place or "the value"
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    right = isinstance(value, types[schema["type"]]) and (schema["type"] != "integer" or not isinstance(value, bool))
    if not right:
        return f"{where} is not of type {schema['type']}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} is {value!r}, not one of {schema['enum']}"
    if schema["type"] == "integer" and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{where} is {value}, out of range"
    if schema["type"] == "string" and len(value) > schema.get("maxLength", len(value)):
        return f"{where} has {len(value)} characters, at most {schema['maxLength']} are allowed"
    if schema["type"] == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{where} has {len(value)} items"
        problems = [schema_problem(item, schema["items"], f"{where}[{at}]") for at, item in enumerate(value)]
        return next(filter(None, problems), "")
    if schema["type"] == "object":
        missing = [name for name in schema["required"] if name not in value]
        extra = [name for name in value if name not in schema["properties"]]
        if missing or extra:
            return f"{where} lacks {missing[0]!r}" if missing else f"{where} has {extra[0]!r}, which the schema does not name"
        problems = [schema_problem(item, schema["properties"][name], name) for name, item in value.items()]
        return next(filter(None, problems), "")
    return ""


def lost_call(text: str, names: set[str]) -> bool:
    """Whether the text still has a well-formed call of a known tool, which the server's parser should have extracted."""
    for found in re.finditer(r"\{", text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[found.start() :])
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("name") in names and {"arguments", "parameters"} & value.keys():
            return True
    return False


def common_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def first_difference(here: str, there: str) -> str:
    at = common_length(here, there)
    return f"at character {at}: {here[at : at + 30]!r} against {there[at : at + 30]!r}"
