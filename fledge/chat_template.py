"""Chat templates rendered by jinja2 alone, as transformers renders them."""

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

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # put behind a message that is to be continued, to find its end in the text
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates read the first two


class _Generation(Extension):
    """`{% generation %}` marks what training counts; rendering leaves it as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _body(self, context: nodes.EvalContext, caller: Any) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """A template is a stranger's program: no way to Python's internals through names with underscores."""

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
    """`variables`: the marks by their names (`bos_token` …), and what the caller adds for the template."""
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
        raise ValueError("the last message cannot be continued: the template does not write it as it is")
    end = text.rindex(END_MARK.strip())
    # A template that strips messages has stripped the mark's own space: the text before it was to be stripped too.
    return text[:end] if text[end:].startswith(END_MARK) else text[:end].rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with a mark at its end, and its text: of parts, the last that has one."""
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
