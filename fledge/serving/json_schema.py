"""Rewrites a client's JSON schema into one that the grammar library enforces in full, and refuses keywords it cannot enforce.

The library (xgrammar) silently ignores some keywords: `not`, `uniqueItems`, `allOf` of several schemas, any keyword beside
`$ref`, `anyOf` or `const`. A rewritten schema has one of five forms, each of which the library enforces:

    true        {"$ref": "#/$defs/r1"}        {"enum": [...]}        {"anyOf": [...]}        {"type": T, and T's own keywords}

A rewritten schema may allow less than the original, never more. `tests/serving/test_json_schema.py` samples from the grammars.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from fledge.errors import RequestError
from fledge.serving.json_patterns import FORMATS, UNSUPPORTED_FORMATS, json_pattern

Node = dict[str, Any]
Schema = Node | bool

# Keywords by type, which are rewritten below.
KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": (
        "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    ),
    "array": ("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
}  # fmt: skip
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
UNSUPPORTED = ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type")
KNOWN = frozenset(itertools.chain(*KEYWORDS.values(), UNSUPPORTED, APPLICATORS))
# The meaning of these depends on the properties or items named beside them, so they cannot be merged with others.
NEEDS_ALL = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "items",
    "additionalItems",
    "unevaluatedItems",
)
# A schema that refers to itself with constraints beside `$ref` would be expanded without end.
MAX_NODES, MAX_DEPTH = 20_000, 100
# Limit on compared pairs of `oneOf` alternatives: 4,000 take about 10 ms.
MAX_PAIRS = 4_000
# `multipleOf` with bounds is written as a list of at most MAX_VALUES values. Without bounds the library tracks remainders, for
# which the multiple may be at most MAX_MULTIPLE.
MAX_VALUES, MAX_MULTIPLE = 1_000, 1_024
# Marks a schema without a type, which is written with the type of its keywords: `{"minimum": 1}` allows strings, too.
GUESSED = "the type was not given"
JSON_TYPES = {
    str: "string",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
    int: "integer",
    float: "number",
}


def supported_schema(schema: Schema) -> Schema:
    """Returns the schema rewritten for the grammar library. RequestError names an unsupported keyword and its place."""
    return Rewriter(schema).run()


def refusal(at: str, reason: str) -> RequestError:
    return RequestError(f"the JSON schema cannot be followed: {at}: {reason}")


class Rewriter:
    def __init__(self, root: Schema) -> None:
        self.root = root
        self.definitions: Node = {}
        self.names: dict[str, str] = {}  # names of definitions, by the place that `$ref` points to
        self.num_nodes = self.num_pairs = 0

    def run(self) -> Schema:
        written = self.rewrite(self.root, "#")
        if isinstance(written, bool) or not self.definitions:
            return written
        return written | {"$defs": self.definitions}

    def rewrite(self, node: Any, at: str) -> Schema:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES or at.count("/") > MAX_DEPTH:
            raise refusal(at, "the schema is too large once its references are followed; make it simpler")
        if node is False:
            raise refusal(at, "`false` allows no value")
        if node is True:
            return True
        if not isinstance(node, dict):
            raise refusal(at, "a schema must be an object, true or false")
        if "$id" in node and at != "#":
            raise refusal(f"{at}/$id", "only the whole schema may have an id")
        for name in ("$defs", "definitions"):
            if not isinstance(node.get(name, {}), dict):
                raise refusal(f"{at}/{name}", "must be an object")
        given = {name: value for name, value in node.items() if name in KNOWN}
        for name in UNSUPPORTED:
            if name in given:
                raise refusal(f"{at}/{name}", "this keyword is not supported")
        for name in ("allOf", "anyOf", "oneOf"):
            if name in given and (not isinstance(given[name], list) or not given[name]):
                raise refusal(f"{at}/{name}", "must be a list of at least one schema")
        if "$ref" in given:
            return self._reference(given, at)
        if "allOf" in given:
            parts = given.pop("allOf")
            return self.rewrite(self.merge([given, *parts], f"{at}/allOf") if given else self.merge(parts, f"{at}/allOf"), at)
        for name in ("anyOf", "oneOf"):
            if name in given:
                return self._alternatives(name, given, at)
        if "enum" in given or "const" in given:
            return self._values(given, at)
        return self._typed(given, at)

    # References

    def resolve(self, reference: Any, at: str) -> tuple[Schema, str]:
        """Returns the schema that a reference points to, and its place."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise refusal(f"{at}/$ref", f"only references into the same schema (#/...) are supported, not {reference!r:.80}")
        found: Any = self.root
        for part in unquote(reference[1:]).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isascii() and part.isdecimal() and int(part[:9]) < len(found):
                found = found[int(part[:9])]
            else:
                raise refusal(f"{at}/$ref", f"{reference!r:.80} points to nothing")
        return found, reference

    def target(self, node: Any, at: str) -> Any:
        """Follows references that have no other keywords beside them. Returns the first other node."""
        seen = set()
        while isinstance(node, dict) and "$ref" in node and not any(name in KNOWN for name in node if name != "$ref"):
            if node["$ref"] in seen:
                raise refusal(f"{at}/$ref", "the reference leads back to itself")
            seen.add(node["$ref"])
            node = self.resolve(node["$ref"], at)[0]
        return node

    def _reference(self, given: Node, at: str) -> Schema:
        beside = {name: value for name, value in given.items() if name != "$ref"}
        found, place = self.resolve(given["$ref"], at)
        if beside:
            return self.rewrite(self.merge([beside, found], at), at)
        found = self.target(given, at)
        if isinstance(found, bool):
            return self.rewrite(found, at)
        if place not in self.names:
            self.names[place] = f"r{len(self.names)}"
            self.definitions[self.names[place]] = {}  # reserves its place in the order; {} while it is being rewritten
            self.definitions[self.names[place]] = self.rewrite(found, place)
        return {"$ref": f"#/$defs/{self.names[place]}"}

    # allOf

    def merge(self, parts: Sequence[Any], at: str) -> Schema:
        """Merges schemas that must all hold into one. RequestError: their keywords conflict."""
        nodes: list[Node] = []
        left, seen = list(parts), set()
        while left:
            part = left.pop(0)
            if part is True:
                continue
            if not isinstance(part, dict):
                raise refusal(at, "`false` allows no value" if part is False else "a schema must be an object, true or false")
            known = {name: value for name, value in part.items() if name in KNOWN}
            if "$ref" in known:
                reference = known.pop("$ref")
                left.append(self.resolve(reference, at)[0])
                if reference in seen:
                    raise refusal(f"{at}/$ref", "the reference leads back to itself")
                seen.add(reference)
            nodes += [known] if known else []
        merged: Node = {}
        for node in nodes:
            for name, value in node.items():
                if name not in merged or merged[name] == value:
                    merged[name] = value
                elif name == "required" and isinstance(value, list) and isinstance(merged[name], list):
                    merged[name] = [*merged[name], *(one for one in value if one not in merged[name])]
                elif name == "properties" and isinstance(value, dict) and isinstance(merged[name], dict):
                    for key in value:
                        if key in merged[name] and merged[name][key] != value[key]:
                            raise refusal(at, f"the property {key!r:.80} has two schemas that must both hold; write one")
                    merged[name] = merged[name] | value
                else:
                    raise refusal(at, f"two schemas that must both hold have `{name}`; write one schema")
        for node in nodes:
            if any(name in node for name in NEEDS_ALL):
                others = [other for other in nodes if other is not node]
                keys = itertools.chain(*(other.get("properties", ()) for other in others))
                if any(key not in node.get("properties", ()) for key in keys) or any(
                    name in other for other in others for name in (*NEEDS_ALL, "prefixItems")
                ):
                    raise refusal(at, "additionalProperties/items beside another schema's properties/items; write one schema")
        return merged

    # anyOf, oneOf, enum and const

    def _alternatives(self, name: str, given: Node, at: str) -> Schema:
        alternatives = given.pop(name)
        places = [f"{at}/{name}/{number}" for number in range(len(alternatives))]
        written = [
            self.rewrite(self.merge([given, one], place) if given else one, place)
            for one, place in zip(alternatives, places, strict=True)
        ]
        if name == "oneOf":
            for one, other in itertools.combinations(written, 2):
                self.num_pairs += 1
                if self.num_pairs > MAX_PAIRS or not (self._excludes(one, other) and self._excludes(other, one)):
                    raise refusal(f"{at}/oneOf", "more than one alternative may hold; use anyOf, or tell them apart by a const")
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _excludes(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Whether no value of `one` as written is valid for `other`; False if this cannot be told easily."""
        one, other = self._definition(one), self._definition(other)
        if depth > 4 or isinstance(one, bool) or isinstance(other, bool) or "$comment" in other:
            return False
        for each, rest, swapped in ((one, other, False), (other, one, True)):
            if "anyOf" in each:
                self.num_pairs += len(each["anyOf"])
                pairs = [(rest, part) if swapped else (part, rest) for part in each["anyOf"]]
                return self.num_pairs <= MAX_PAIRS and all(self._excludes(mine, theirs, depth + 1) for mine, theirs in pairs)
        values = [node.get("enum") for node in (one, other)]
        if values[0] is not None and values[1] is not None:
            return not {*map(_key, values[0])} & {*map(_key, values[1])}
        types = [{_type_of(value) for value in node["enum"]} if "enum" in node else {node.get("type")} for node in (one, other)]
        if None in types[0] | types[1]:
            return False
        if not types[0] & types[1] and not {"integer", "number"} <= types[0] | types[1]:
            return True
        if types != [{"object"}, {"object"}] or "enum" in one or "enum" in other:
            return False
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        is_closed = bool(mine) and not one.get("additionalProperties") and "patternProperties" not in one
        if is_closed and any(key not in mine for key in other.get("required", ())):
            return True
        return any(
            key in theirs and self._excludes(mine[key], theirs[key], depth + 1)
            for key in mine
            if key in one.get("required", ()) or key in other.get("required", ())
        )

    def _definition(self, node: Schema) -> Schema:
        while isinstance(node, dict) and "$ref" in node:
            node = self.definitions[node["$ref"].removeprefix("#/$defs/")] or True  # {}: it is being rewritten
        return node

    def _values(self, given: Node, at: str) -> Schema:
        values = given["enum"] if "enum" in given else [given["const"]]
        if not isinstance(values, list):
            raise refusal(f"{at}/enum", "must be a list")
        if "enum" in given and "const" in given:
            values = [value for value in values if _key(value) == _key(given["const"])]
        if "type" in given:
            types = self._types(given, at)
            types += ["integer"] if "number" in types else []
            values = [value for value in values if _type_of(value) in types]
        for name in given:
            if name not in ("enum", "const", "type"):
                raise refusal(f"{at}/{name}", "not supported beside enum or const; list only the values that are allowed")
        if not values:
            raise refusal(at, "no value is left to choose")
        return {"enum": values}

    # By type

    def _types(self, given: Node, at: str) -> list[str]:
        named = given.get("type")
        types = [named] if isinstance(named, str) else named
        if "type" in given:
            if not isinstance(types, list) or not types or any(one not in TYPES for one in types):
                raise refusal(f"{at}/type", f"must be one or more of {', '.join(TYPES)}")
            return list(dict.fromkeys(types))
        return [kind for kind, names in KEYWORDS.items() if any(name in given for name in names)]

    def _typed(self, given: Node, at: str) -> Schema:
        types = self._types(given, at)
        if not types:
            return True
        rewriters = {"string": self._string, "object": self._object, "array": self._array}
        written = []
        for kind in types:
            mine = {name: given[name] for name in KEYWORDS.get("number" if kind == "integer" else kind, ()) if name in given}
            if kind in ("integer", "number"):
                written.append(self._number(kind, mine, at))
            else:
                written.append({"type": kind} | (rewriters[kind](mine, at) if kind in rewriters else {}))
            if "type" not in given:
                written[-1]["$comment"] = GUESSED
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _string(self, given: Node, at: str) -> Node:
        for name in ("minLength", "maxLength"):
            _check_count(given, name, at)
        form = given.pop("format", None)
        if form in UNSUPPORTED_FORMATS:
            raise refusal(f"{at}/format", f"the format {form!r:.40} is not supported; use a pattern")
        is_followed = isinstance(form, str) and form in FORMATS
        first = "format" if is_followed else "pattern"
        beside = [name for name in given if name != first]
        if beside and (is_followed or first in given):
            raise refusal(f"{at}/{beside[0]}", f"not supported beside {first}; write both as one pattern")
        if is_followed:
            pattern = FORMATS[form]
            return {"format": form} if pattern is None else {"pattern": pattern}
        if "pattern" in given:
            return {"pattern": json_pattern(given["pattern"], f"{at}/pattern", refusal)}
        return given

    def _number(self, kind: str, given: Node, at: str) -> Node:
        for side, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(flag := given.get(exclusive), bool):  # as in draft 4
                del given[exclusive]
                if flag and side in given:
                    given[exclusive] = given.pop(side)
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise refusal(f"{at}/{name}", "must be a number")
        multiple = given.pop("multipleOf", None)
        if multiple is not None and (multiple <= 0 or multiple != int(multiple)):
            raise refusal(f"{at}/multipleOf", "only whole numbers above 0 are supported")
        if kind == "number" and multiple is None:
            return {"type": kind} | given
        lows = [math.ceil(given["minimum"])] if "minimum" in given else []
        lows += [math.floor(given["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in given else []
        highs = [math.floor(given["maximum"])] if "maximum" in given else []
        highs += [math.ceil(given["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in given else []
        if multiple is None:
            bounds = ({"minimum": max(lows)} if lows else {}) | ({"maximum": min(highs)} if highs else {})
            return {"type": "integer"} | bounds
        multiple = int(multiple)
        if lows and highs:
            first, last = -(-max(lows) // multiple), min(highs) // multiple
            if last - first < MAX_VALUES:
                return self.rewrite({"enum": [multiple * number for number in range(first, last + 1)]}, at)  # type: ignore[return-value]
        if lows or highs or multiple > MAX_MULTIPLE:
            raise refusal(f"{at}/multipleOf", f"not supported with these bounds, or above {MAX_MULTIPLE}")
        return {"type": "integer", "multipleOf": multiple}

    def _object(self, given: Node, at: str) -> Node:
        for name in ("minProperties", "maxProperties"):
            _check_count(given, name, at)
        properties, required = given.get("properties", {}), given.get("required", [])
        patterns, names = given.get("patternProperties"), given.get("propertyNames")
        if not isinstance(properties, dict) or not isinstance(patterns, dict | None):
            raise refusal(at, "properties and patternProperties must be objects")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise refusal(f"{at}/required", "must be a list of names")
        additional = given.get("additionalProperties", given.get("unevaluatedProperties"))
        undeclared = [name for name in dict.fromkeys(required) if name not in properties]
        if undeclared and (additional is False or patterns is not None or names is not None):
            raise refusal(f"{at}/required", f"{undeclared[0]!r:.80} is not among the properties")
        properties = properties | dict.fromkeys(undeclared, True if additional is None else additional)
        written: Node = {}
        if properties or "properties" in given:  # empty: no property is allowed
            written["properties"] = {
                key: self.rewrite(value, f"{at}/properties/{_escaped(key)}") for key, value in properties.items()
            }
        if required:
            written["required"] = list(dict.fromkeys(required))
        if patterns:
            place = f"{at}/patternProperties"
            if properties or names is not None or (len(patterns) > 1 and len({*map(_key, patterns.values())}) > 1):
                raise refusal(place, "only one pattern is supported, and neither properties nor propertyNames beside it")
            written["patternProperties"] = {
                json_pattern(key, place, refusal): self.rewrite(value, f"{place}/{_escaped(key)}")
                for key, value in patterns.items()
            }
        elif names is not None and names is not True:
            if properties:
                raise refusal(f"{at}/propertyNames", "not supported beside properties")
            written["propertyNames"] = self._names(names, f"{at}/propertyNames")
        if additional is not None and not patterns:
            place = f"{at}/{'additionalProperties' if 'additionalProperties' in given else 'unevaluatedProperties'}"
            written["additionalProperties"] = False if additional is False else self.rewrite(additional, place)
        counts = {name: given[name] for name in ("minProperties", "maxProperties") if name in given}
        if counts.get("minProperties", 0) <= len(written.get("required", ())):
            counts.pop("minProperties", None)
        is_open = (
            bool(patterns) or names is not None or bool(written.get("additionalProperties")) or "properties" not in written
        )
        if counts and is_open:
            if counts.get("minProperties", 0) > 1:
                raise refusal(f"{at}/minProperties", "above 1 only declared properties are counted: other keys may be repeated")
            if not patterns and names is None:
                written.setdefault("additionalProperties", True)
        return written | counts

    def _names(self, given: Any, at: str) -> Schema:
        """Rewrites a schema of property names, which are strings. The library takes a list of values, a pattern or a length."""
        given = self.target(given, at)
        if isinstance(given, dict) and not any(name in given for name in APPLICATORS):
            given = given | {"type": "string"}
        written = self.rewrite(given, at)
        if not isinstance(written, dict) or not ("enum" in written or written.get("type") == "string"):
            raise refusal(at, "only a list of names, a pattern or a length is supported")
        return written

    def _array(self, given: Node, at: str) -> Node:
        for name in ("minItems", "maxItems"):
            _check_count(given, name, at)
        prefix, items = given.get("prefixItems", []), given.get("items", given.get("unevaluatedItems", True))
        if isinstance(items, list):  # as in drafts up to 2019-09
            prefix, items = items, given.get("additionalItems", True)
        if not isinstance(prefix, list):
            raise refusal(f"{at}/prefixItems", "must be a list")
        longest = given.get("maxItems", math.inf)
        if given.get("uniqueItems") and longest > 1:
            raise refusal(f"{at}/uniqueItems", "this keyword is not supported")
        written: Node = {}
        if prefix[: int(min(longest, len(prefix)))]:
            kept = prefix[: int(min(longest, len(prefix)))]
            written["prefixItems"] = [self.rewrite(one, f"{at}/prefixItems/{number}") for number, one in enumerate(kept)]
        is_full = len(written.get("prefixItems", ())) >= longest
        written["items"] = False if items is False or is_full else self.rewrite(items, f"{at}/items")
        return written | {name: given[name] for name in ("minItems", "maxItems") if name in given}


def _check_count(given: Mapping[str, Any], name: str, at: str) -> None:
    value = given.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise refusal(f"{at}/{name}", "must be a whole number, 0 or more")


def _type_of(value: Any) -> str:
    return "integer" if isinstance(value, float) and value.is_integer() else JSON_TYPES[type(value)]


def _key(value: Any) -> str:
    """Returns a key that is the same for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
