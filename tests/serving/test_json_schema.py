"""Texts sampled from the grammar that xgrammar compiles for a schema must be valid under the schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fledge.errors import RequestError
from fledge.serving.grammar_worker import compile_grammar
from fledge.serving.json_schema import supported_schema

xgrammar = pytest.importorskip("xgrammar")

VOCABULARY = ["<end>", *map(chr, range(32, 127))]


@pytest.fixture(scope="module")
def library():
    kind = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=kind, vocab_size=len(VOCABULARY), stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def draw(grammar, seed: int, longest: int = 300) -> str | None:
    """Samples a text of a grammar, with a bias towards closing brackets and quotes; None if it did not end."""
    chance, matcher, text = random.Random(seed), xgrammar.GrammarMatcher(grammar), ""
    mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
    for _ in range(longest):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [token for token in range(len(VOCABULARY)) if words[token // 32] >> token % 32 & 1]
        if not allowed or (0 in allowed and chance.random() < 0.7):
            return text
        token = chance.choices(allowed, [30 if VOCABULARY[token] in '"}],' else 1 for token in allowed])[0]
        if token == 0:
            return text
        matcher.accept_token(token)
        text += VOCABULARY[token]
    return None


def invalid_texts(library, schema: Any, num_texts: int) -> list[str]:
    grammar = compile_grammar(library, "JSON schema", json.dumps(supported_schema(schema)))
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    texts = [text for seed in range(num_texts) if (text := draw(grammar, seed)) is not None]
    return [text for text in texts if not validator.is_valid(json.loads(text))]


def obj(**fields: Any) -> dict[str, Any]:
    return {"type": "object"} | fields


ONE, TWO = {"const": 1}, {"const": 2}
A, B = obj(properties={"a": ONE}, required=["a"]), obj(properties={"b": TWO}, required=["b"])
FOLLOWED = {
    "allOf, several": {"allOf": [A, B]},
    "allOf, one": {"allOf": [A]},
    "allOf, one beside others": {"allOf": [A]} | B,
    "allOf of references": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
    "beside $ref": {"$ref": "#/$defs/a", "properties": {"c": ONE}, "required": ["c"], "$defs": {"a": A}},
    "beside anyOf": obj(properties={"a": ONE, "b": ONE}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "type beside anyOf": {"type": "integer", "anyOf": [{"minimum": 5, "maximum": 9}, {"maximum": 3}]},
    "oneOf told apart by a const": {
        "oneOf": [obj(properties={"k": {"const": kind}, "v": {"type": "integer"}}, required=["k"]) for kind in "xyz"]
    },
    "oneOf told apart by what is required": {"oneOf": [A, B]},
    "oneOf of types": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    "required, undeclared": obj(properties={"a": ONE}, required=["a", "z"]),
    "required, undeclared and additional": obj(properties={"a": ONE}, required=["z"], additionalProperties=TWO),
    "escaped reference": obj(properties={"a": {"$ref": "#/$defs/a~1b%20~0"}}, required=["a"], **{"$defs": {"a/b ~": ONE}}),
    "reference by number": {"anyOf": [ONE, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]},
    "recursive": obj(properties={"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, required=["next"]),
    "enum and types": {"type": ["string", "null"], "enum": ["a", None, 3]},
    "keywords without a type": {"maxLength": 2, "minimum": 3, "maximum": 5},
    "list of types": {"type": ["integer", "string", "object"], "multipleOf": 7, "maxLength": 3, "maxProperties": 1},
    "multipleOf with bounds": {"type": "integer", "multipleOf": 7, "minimum": -10, "exclusiveMaximum": 700},
    "multipleOf of a number": {"type": "number", "multipleOf": 4},
    "bounds with fractions": {"type": "integer", "minimum": 1.5, "maximum": 3.5},
    "property names": obj(propertyNames={"$ref": "#/$defs/n"}, additionalProperties=ONE, **{"$defs": {"n": {"enum": ["q"]}}}),
    "property counts": obj(properties={"a": ONE, "b": ONE, "c": ONE}, minProperties=1, maxProperties=2, required=["b"]),
    "open and not empty": obj(minProperties=1),
    "pattern properties": obj(patternProperties={"^q+$": ONE}, maxProperties=2),
    "unevaluatedProperties": obj(properties={"a": ONE}, unevaluatedProperties=False),
    "items, any": {"type": "array", "minItems": 2},
    "tuple cut short": {"type": "array", "prefixItems": [ONE, TWO], "items": {"const": 3}, "maxItems": 1},
    "tuple as in draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [ONE, TWO], "additionalItems": False,
    },
    "unique of one": {"type": "array", "items": ONE, "uniqueItems": True, "maxItems": 1},
    "a quote and a backslash": {"type": "string", "pattern": r'^"a\\[^"\\]$'},
    "a line break": {"type": "string", "pattern": r"^a\nb\tc$"},
    "optional group that ends in a loop": {"type": "string", "pattern": "^a(x[0-9]+)?(?:y(z+)?)??b$"},
    "named group": {"type": "string", "pattern": "^(?<year>x[0-9]{2,4})?b$"},
    "annotations": {"type": "string", "maxLength": 3, "title": "x", "default": "y", "nullable": True, "format": "int32"},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
    },
}  # fmt: skip
REFUSED = {
    "#/not": {"not": {"type": "null"}},
    "#/if": {"if": A, "then": B},
    "#/items/uniqueItems": {"type": "array", "items": {"type": "array", "uniqueItems": True}},
    "#/contains": {"type": "array", "contains": ONE},
    "#/dependentRequired": obj(dependentRequired={"a": ["b"]}),
    "#/properties/a~1b/dependentSchemas": obj(properties={"a/b": {"dependentSchemas": {}}}),
    "#/allOf: the property 'a'": {"allOf": [A, obj(properties={"a": TWO})]},
    "#/allOf: additionalProperties": {"allOf": [A | {"additionalProperties": False}, B]},
    "#/oneOf": {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
    "#/oneOf: more": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "#/required: 'z'": obj(required=["z"], additionalProperties=False),
    "#/maxLength: not supported beside enum": {"enum": ["a", "abc"], "maxLength": 1},
    "#/format: the format 'iri'": {"type": "string", "format": "iri"},
    "#/maxLength: not supported beside format": {"type": "string", "format": "date", "maxLength": 3},
    "#/minLength: not supported beside pattern": {"type": "string", "pattern": "^a+$", "minLength": 3},
    "#/pattern: lookaheads": {"type": "string", "pattern": "^(?=a).$"},
    "#/pattern: '\"'": {"type": "string", "pattern": '^["a]$'},
    "#/properties/a/$ref": obj(properties={"a": {"$ref": "#foo"}}, **{"$defs": {"x": {"$anchor": "foo", "const": 1}}}),
    "#/$ref: '#/nowhere' points": {"$ref": "#/nowhere"},
    "#/$ref: the reference leads": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "#/$ref: only references into": {"$ref": "http://example.com/x"},
    "#/multipleOf": {"type": "number", "multipleOf": 0.01},
    "#/minProperties": obj(minProperties=2, additionalProperties=ONE),
    "#/patternProperties": obj(patternProperties={"^a": ONE, "b$": TWO}),
    "#/propertyNames": obj(properties={"a": ONE}, propertyNames={"pattern": "^b$"}),
    "#/type": {"type": "nonsense"},
    "#/anyOf": {"anyOf": []},
    "#/enum": {"enum": "x"},
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_texts_of_the_grammar_are_valid(library, name: str) -> None:
    assert invalid_texts(library, FOLLOWED[name], 30) == []


def test_an_object_of_no_properties_is_empty(library) -> None:
    """Such a schema describes the arguments of a tool without parameters."""
    grammar = compile_grammar(library, "JSON schema", json.dumps(supported_schema(obj(properties={}))))
    assert {draw(grammar, seed) for seed in range(20)} == {"{}"}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_keywords_are_refused_by_name_and_path(reason: str) -> None:
    with pytest.raises(RequestError, match=f"JSON schema cannot be followed: {re.escape(reason)}"):
        supported_schema(REFUSED[reason])


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"x": {"properties": {"a": {"$ref": "#/$defs/x", "maxLength": 2}}}}, "$ref": "#/$defs/x"},
        {"oneOf": [{"const": number} for number in range(3000)]},
        {"anyOf": [{"oneOf": [{"const": f"{n} {m}"} for m in range(60)]} for n in range(60)]},
    ],
)
def test_schemas_that_would_grow_when_rewritten_are_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="JSON schema cannot be followed"):
        supported_schema(schema)


VALUES = st.sampled_from([1, 2, 3.5, "a", "b", None, True, [1], {"a": 1}])
NUMBERS = st.integers(0, 4)
NAMES = st.sampled_from("abc")


def nested(inner: st.SearchStrategy) -> st.SearchStrategy:
    some = st.lists(inner, min_size=1, max_size=3)
    fields = {
        "type": st.sampled_from(["object", "array", "string", "integer", "number"]) | st.just(["object", "null"]),
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b", "#"]),
        "pattern": st.sampled_from(["^a(b[cd]+)?$", "[a-c]", "^\\d{2}$"]),
        "uniqueItems": st.booleans(),
        "multipleOf": st.integers(1, 5),
        **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), NUMBERS),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), st.integers(-3, 9)),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), some),
    }
    return st.fixed_dictionaries({}, optional=fields).map(lambda node: dict(list(node.items())[:3]))


SCHEMAS = st.recursive(st.booleans() | VALUES.map(lambda value: {"const": value}), nested, max_leaves=6)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=st.lists(SCHEMAS, min_size=3, max_size=3), seed=st.integers(0, 99))
def test_random_schemas_are_followed_or_refused(library, schema: list[Any], seed: int) -> None:
    """A schema is never followed in part: it is followed completely or refused."""
    root, first, second = schema
    if isinstance(root, bool):
        return
    root = root | {"$defs": {"a": first, "b": second}}
    try:
        validator = jsonschema_rs.validator_for(root)
        grammar = compile_grammar(library, "JSON schema", json.dumps(supported_schema(root)))
    except (RequestError, RuntimeError, jsonschema_rs.ValidationError):
        return
    for number in range(3):
        text = draw(grammar, seed + number, 150)
        if text:
            assert validator.is_valid(json.loads(text)), f"{json.dumps(root)} allowed {text}"
