"""Turns chat messages into the prompt for the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fledge.errors import RequestError
from fledge.serving.errors import ApiError
from fledge.serving.limits import Limits, check_json
from fledge.serving.protocol import ChatMessage, ChatRequest, TextPart, TokenizeRequest, Tool
from fledge.serving.service import SHORT_TEXT, Service
from fledge.tokenizer import Tokenizer

MESSAGE_CHARACTERS = 32  # characters that a template writes around a message, about
TEXT_PARTS = ("text", "input_text", "output_text")
# Template arguments that the server passes itself, so that requests may not set them.
RESERVED_KWARGS = {"messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt"}
RESERVED_KWARGS |= {"continue_final_message", "return_tensors", "return_dict", "padding", "truncation", "max_length"}
RESERVED_KWARGS |= {"self", "tokenizer_kwargs", "documents"}


def render(service: Service, tokenizer: Tokenizer, payload: ChatRequest | TokenizeRequest, tools: Sequence[Tool] | None) -> str:
    """Renders the messages with the chat template. `tools`: the tools to put into the prompt."""
    kwargs = payload.chat_template_kwargs or {}
    reserved = sorted(RESERVED_KWARGS & set(kwargs))
    if reserved:
        raise ApiError(f"chat_template_kwargs may not set {reserved[0]!r}", param="chat_template_kwargs")
    return tokenizer.render_chat(
        [_template_message(message, service.limits) for message in payload.messages or ()],
        add_generation_prompt=payload.add_generation_prompt,
        chat_template=service.flags.chat_template,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        continue_final_message=payload.continue_final_message,
        **kwargs,
    )


def length(messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None, kwargs: dict[str, Any] | None = None) -> int:
    """Estimates the rendered prompt's characters from the template's input. Tools and calls never count as short text."""
    total = _characters(kwargs) if kwargs else 0
    for message in messages:
        total += len(plain_text(message.content)) + MESSAGE_CHARACTERS
        for text in (message.name, message.tool_call_id, message.reasoning or message.reasoning_content):
            total += len(text or "")
        if message.tool_calls:
            total += SHORT_TEXT + sum(_characters(call.model_dump()) for call in message.tool_calls)
    if tools:
        total += SHORT_TEXT + sum(_characters(tool.model_dump()) for tool in tools)
    return total


def _characters(value: Any) -> int:
    """Counts the characters of a JSON value's strings; any other value counts as 4."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += len(one) if isinstance(one, str) else 4
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
    return total


def plain_text(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXT_PARTS and part.type != "refusal":
            raise ApiError(f"content of type {part.type!r} is not supported; only text is", param="messages")
    return "\n".join(part.text or part.refusal or "" for part in content)


def _template_message(message: ChatMessage, limits: Limits) -> dict[str, Any]:
    """Converts a message to the form that templates expect: plain text, and arguments of earlier calls as objects."""
    result: dict[str, Any] = {"role": message.role, "content": plain_text(message.content)}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    thought = message.reasoning or message.reasoning_content
    if thought:
        result["reasoning"] = result["reasoning_content"] = thought
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, limits)},
            }
            for call in message.tool_calls
        ]
    return result


def _arguments(text: str, limits: Limits) -> Any:
    try:
        value = json.loads(text) if text.strip() else {}
        check_json(value, limits)
        return value
    except RequestError as error:
        raise ApiError(f"the arguments of an earlier tool call cannot be used: {error}", param="messages") from None
    except (ValueError, RecursionError):  # ValueError also for a number of thousands of digits
        raise ApiError("the arguments of an earlier tool call are not valid JSON", param="messages") from None
