"""Renders chat templates with jinja2 alone; the result is the same as from transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # appended to a message that is to be continued, to find its end in the rendered text
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning; templates read the first two


class _Generation(Extension):
    """`{% generation %}` marks the text that training computes the loss on; rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _body(self, context: nodes.EvalContext, caller: Any) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """Refuses names with a leading underscore: templates are untrusted code and must not reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"chat templates cannot set {name!r}")
        super().__setitem__(name, value)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _SafeNamespace,
    }
    return environment.from_string(template)


def render(
    template: str,
    messages: Sequence[dict[str, Any]],
    *,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Returns the rendered text. `variables`: the special tokens by name (`bos_token` …) and the caller's own variables."""
    if not messages:
        raise ValueError("there are no messages")
    messages = [_with_reasoning(message) for message in messages]
    last = ""
    if continue_final_message:
        messages[-1], last = _marked(messages[-1])
    text = _compiled(template).render(
        messages=messages, tools=tools, documents=variables.pop("documents", None),
        add_generation_prompt=add_generation_prompt, **variables,
    )  # fmt: skip
    if not continue_final_message:
        return text
    if last.strip() not in text or END_MARK.strip() not in text:
        raise ValueError("the last message cannot be continued: the template changes its text")
    end = text.rindex(END_MARK.strip())
    # The mark ends in a space. If the template stripped it, it strips messages, and the text before the mark is stripped too.
    return text[:end] if text[end:].startswith(END_MARK) else text[:end].rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both keys that templates read."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with END_MARK after its text, and that text. A content of several parts: the last part with a text."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + END_MARK}, content
    parts = [dict(part) for part in content or ()]
    part = next((part for part in reversed(parts) if "text" in part), None)
    if part is None:
        raise ValueError("the last message has no text to continue")
    text = part["text"]
    part["text"] += END_MARK
    return message | {"content": parts}, text
