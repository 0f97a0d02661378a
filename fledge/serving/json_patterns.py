"""Rewrites regular expressions of JSON schemas so that the grammar library generates valid JSON strings from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"[12][0-9]{{3}}-{_DAY}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](|\.[0-9]{1,6})(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](|[A-Za-z0-9-]{0,20}[A-Za-z0-9])"
# By format: a pattern to use if the library's allows wrong values (30 February, second 60, byte 08); None: the library's own.
FORMATS: dict[str, str | None] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(|\.[A-Za-z0-9_+-]{{1,16}})@{_LABEL}(|\.{_LABEL})\.[A-Za-z]{{2,16}}$",
    **dict.fromkeys(("duration", "hostname", "ipv6", "uri", "uri-reference", "uri-template", "uuid")),
}
# The standard's other formats. Formats that the standard does not define ("int32", "binary") are ignored.
UNSUPPORTED_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex", "json-pointer", "relative-json-pointer")
# Characters that JSON writes with a backslash in a string -> what follows the backslash.
_ESCAPES = {'"': '"', "\\": "\\", "\n": "n", "\t": "t", "\r": "r", "\f": "f", "\b": "b"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_KEPT = "dDwWsS"  # character classes
# The library refuses these itself, with its own message.
_REFUSED_THERE = "bBpPk123456789"


def json_pattern(pattern: Any, at: str, refusal: Callable[[str, str], Exception]) -> str:
    """Returns a pattern for strings as JSON writes them. RequestError from `refusal`: the pattern is not supported.

    The library does not escape literal characters of a pattern, and ignores lookaheads. It also reads `(xy+)?` as `(x?y+)?`,
    so an optional group is written as `(|xy+)`, which means the same and is read correctly.
    """
    if not isinstance(pattern, str):
        raise refusal(at, "must be a string")
    written: list[str] = []
    groups: list[int] = []  # indices in `written` at which the open groups begin
    in_class = is_negated = False
    place = 0
    while place < len(pattern):
        char, place = pattern[place], place + 1
        literal: str | None = char
        spelled = char
        if char == "\\":
            if place == len(pattern):
                raise refusal(at, "ends with a backslash")
            spelled = pattern[place - 1 : place + 1]
            char, place = pattern[place], place + 1
            literal = char if not char.isalnum() else _CONTROLS.get(char)
            if char in "xu":
                digits = pattern[place : place + (2 if char == "x" else 4)]
                try:
                    literal = chr(int(digits, 16))
                except ValueError:
                    raise refusal(at, f"\\{char} needs hexadecimal digits") from None
                spelled, place = spelled + digits, place + len(digits)
            elif literal is None and char not in _KEPT + _REFUSED_THERE:
                raise refusal(at, f"\\{char} is not supported")
        elif in_class:
            if char == "]":
                in_class, literal = False, None
        elif char == "[":
            in_class, literal, is_negated = True, None, pattern[place : place + 1] == "^"
        elif char == "(":
            if pattern[place : place + 2] in ("?=", "?!"):
                raise refusal(at, "lookaheads are not supported")
            if pattern.startswith("?:", place):
                spelled, place = "(?:", place + 2
            elif pattern.startswith("?<", place) and pattern[place + 2 : place + 3] not in ("=", "!"):  # a named group
                place = pattern.find(">", place) + 1 or len(pattern)
            groups.append(len(written))
        elif char == ")" and groups:
            begin = groups.pop()
            if pattern.startswith("?", place):
                written[begin] += "|"
                place += 2 if pattern.startswith("??", place) else 1
        if literal is None or not (literal in _ESCAPES or literal < " ") or (in_class and is_negated):
            written.append(spelled)
        elif in_class or literal not in _ESCAPES:
            raise refusal(at, f"{literal!r} is not supported here: JSON writes it with a backslash")
        else:
            escape = _ESCAPES[literal]
            written.append("(?:\\\\" + ("\\\\" if escape == "\\" else escape) + ")")
    return "".join(written)
