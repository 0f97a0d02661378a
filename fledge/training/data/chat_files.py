"""Files of chats, read line by line: OpenAI messages, ShareGPT conversations, and the target's own token ids."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fledge.errors import UserError
from fledge.training.data.rendering import Message, Options

BLOCK_BYTES = 1 << 21

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool", "function": "tool",
}  # fmt: skip

# Arguments of the tokenizer's own rendering, which a data file may not set.
_RESERVED = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}


class DataError(UserError):
    """Training data that cannot be used. The message names the file and, if there is one, the line."""


@dataclass(frozen=True)
class TokenTurn:
    """One turn as exact token ids: the prompt that the target got, and its answer."""

    prompt_ids: list[int]  # the whole prompt, including earlier turns
    answer_ids: list[int]  # including the end-of-turn id, unless the answer was cut off


@dataclass(frozen=True)
class Conversation:
    """Messages, token ids, or both. With both, `turns` are those of the last `len(turns)` assistant messages."""

    messages: tuple[Message, ...] = ()
    turns: tuple[TokenTurn, ...] = ()
    where: str = ""  # "file, line n"
    options: Options = field(default_factory=dict)  # arguments of the chat template in addition to the messages


class Block(NamedTuple):
    """Some lines of a file, or a `problem`. A problem is raised when the block is parsed, so errors come in file order."""

    path: str
    first_line: int
    data: bytes  # whole lines
    problem: str = ""


# --- reading --------------------------------------------------------------------------------------------------------


def read_blocks(path: str | Path) -> Iterator[Block]:
    """Reads a .jsonl or .jsonl.gz in blocks of about `BLOCK_BYTES`."""
    path = Path(path)
    if not path.is_file():
        yield Block(str(path), 0, b"", f"{path}: there is no such file")
        return
    line = 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while data := file.read(BLOCK_BYTES) + file.readline():
                yield Block(str(path), line, data)
                line += data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Block(str(path), line, b"", f"{path}, after line {line - 1}: cannot be read ({error})")


def read_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, object) for each line of a .jsonl or .jsonl.gz; blank lines are skipped."""
    for block in read_blocks(path):
        yield from _lines(block)


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    for block in read_blocks(path):
        yield from conversations_of(block)


def conversations_of(block: Block) -> Iterator[Conversation]:
    """Reads OpenAI messages, ShareGPT conversations and tokenised answers (as `fledge regenerate` writes them).

    A tokenised conversation is yielded whole, unless its template rewrote earlier turns for a later prompt (some
    models drop old thinking): then each part that the target saw as one text is a conversation of its own.
    """
    for where, line in _lines(block):
        if "prompt_ids" in line or "answer_ids" in line:
            yield Conversation(turns=(parse_turn(line, where),), where=where)
            continue
        if "messages" in line:
            messages = parse_messages(line["messages"], where)
        elif "conversations" in line:
            messages = _sharegpt(line["conversations"], where)
        else:
            raise DataError(
                f'{where}: needs "messages", "conversations", or "prompt_ids" and "answer_ids"; '
                f"found {', '.join(map(repr, line)) or 'an empty object'}"
            )
        yield from _split(messages, line.get("turns_ids"), where, parse_options(line, where))


def _lines(block: Block) -> Iterator[tuple[str, dict[str, Any]]]:
    if block.problem:
        raise DataError(block.problem)
    for number, encoded in enumerate(block.data.splitlines(), block.first_line):
        where = f"{block.path}, line {number}"
        try:
            line = encoded.decode()
            if not line.strip():
                continue
            value = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: cannot be read ({error})") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
        yield where, value


# --- parsing --------------------------------------------------------------------------------------------------------


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: messages must be a list")
    return tuple(_message(entry, "role", "content", where) for entry in value)


def user_turns(line: dict[str, Any], where: str) -> list[str]:
    """Returns the user's turns in a line of prompts, from its "turns", "messages" or "prompt"."""
    if "messages" in line:
        return [message["content"] for message in parse_messages(line["messages"], where) if message["role"] == "user"]
    found = line.get("turns", line.get("prompt"))
    turns = [found] if isinstance(found, str) else found
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise DataError(f'{where}: needs "turns", "messages" or "prompt", as text')
    return turns


def parse_options(line: dict[str, Any], where: str) -> Options:
    """Returns a line's `tools` and its `chat_template_kwargs` (such as enable_thinking), as in requests to a server."""
    tools, arguments = line.get("tools") or [], line.get("chat_template_kwargs") or {}
    if not isinstance(tools, list) or not isinstance(arguments, dict):
        raise DataError(f"{where}: tools must be a list, chat_template_kwargs an object")
    if reserved := _RESERVED & arguments.keys():
        raise DataError(f"{where}: chat_template_kwargs may not set {min(reserved)!r}")
    return arguments | ({"tools": tools} if tools else {})


def parse_turn(value: Any, where: str) -> TokenTurn:
    ids = []
    for name in ("prompt_ids", "answer_ids"):
        part = value.get(name) if isinstance(value, dict) else None
        if not isinstance(part, list) or not _are_ids(part):
            raise DataError(f"{where}: {name} must be a list of token ids")
        ids.append(part)
    return TokenTurn(*ids)


def _are_ids(values: list) -> bool:
    """Whether all values are token ids. Avoids a Python loop, since a line has hundreds of ids."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31)


def _sharegpt(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: conversations must be a list")
    messages = []
    for entry in value:
        if isinstance(entry, dict) and "role" in entry and "from" not in entry:
            messages.append(_message(entry, "role", "content", where))
            continue
        message = _message(entry, "from", "value", where)
        if (role := _SHAREGPT_ROLES.get(message["role"])) is None:
            raise DataError(f"{where}: unknown speaker {message['role']!r}; known: {', '.join(_SHAREGPT_ROLES)}")
        messages.append({"role": role, "content": message["content"]})
    return tuple(messages)


def _message(entry: Any, role_key: str, content_key: str, where: str) -> Message:
    if not isinstance(entry, dict) or not isinstance(entry.get(role_key), str):
        raise DataError(f'{where}: each message needs a "{role_key}" and a "{content_key}"')
    content = entry.get(content_key)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None:  # OpenAI's tool calls have no content
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where}: the {content_key} of a {entry[role_key]} message is not text")
    message = {"role": entry[role_key], "content": content}
    if calls := entry.get("tool_calls") or ([{"function": entry["function_call"]}] if entry.get("function_call") else []):
        message["tool_calls"] = _tool_calls(calls, where)
    if reasoning := entry.get("reasoning_content") or entry.get("reasoning"):
        if not isinstance(reasoning, str):
            raise DataError(f"{where}: reasoning_content is not text")
        message["reasoning_content"] = reasoning
    return message | {name: entry[name] for name in ("tool_call_id", "name") if entry.get(name)}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Converts tool calls to the form that chat templates expect: arguments as an object; requests have them as JSON text."""
    try:
        parsed = []
        for call in calls:
            function = dict(call["function"])
            if isinstance(arguments := function.get("arguments"), str):
                function["arguments"] = json.loads(arguments or "{}")
            parsed.append({"type": "function", **call, "function": function})
        if all(isinstance(call["function"]["name"], str) for call in parsed):
            return parsed
    except (TypeError, KeyError, ValueError):
        pass
    raise DataError(f'{where}: each of the tool_calls needs a "function" with a "name" and "arguments" (JSON)')


def _split(messages: tuple[Message, ...], turns_ids: Any, where: str, options: Options) -> Iterator[Conversation]:
    if turns_ids is None:
        yield Conversation(messages, where=where, options=options)
        return
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not isinstance(turns_ids, list) or not 0 < len(turns_ids) <= len(ends):
        raise DataError(f"{where}: turns_ids must be a list with 1 to {len(ends)} entries, one per assistant message")
    ends = ends[-len(turns_ids) :]  # in a conversation with tools, the first assistant messages may belong to the prompt
    joined: list[TokenTurn] = []
    for number, value in enumerate(turns_ids):
        turn = parse_turn(value, where)
        if joined:
            seen = joined[-1].prompt_ids + joined[-1].answer_ids
            if turn.prompt_ids[: len(seen)] != seen:
                yield Conversation(messages[: ends[number - 1]], tuple(joined), where, options)
                joined = []
        joined.append(turn)
    if joined:
        yield Conversation(messages[: ends[-1]], tuple(joined), where, options)


# --- decontamination --------------------------------------------------------------------------------------------------

# Two texts hardly ever share thirteen words in a row by chance; language models are decontaminated with the same number.
RUN = 13
# Texts of fewer than `RUN` words are compared as a whole if they have at least this many: anyone may say "Thank you!".
SHORTEST = 5
# Scripts without spaces are compared by characters; about two make a word.
CHARACTERS_A_WORD = 2

# Thai, Lao, Tibetan, Burmese, Khmer; kana and Chinese characters, including the higher planes.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CHARACTER, _WORD = re.compile(f"[{_UNSPACED}]"), re.compile(f"[^\\W{_UNSPACED}]+")


class Decontamination:
    """Finds texts that overlap with those that must not be trained on, such as the prompts of an evaluation."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.runs = {run for text in texts for run in _runs(text)}

    @classmethod
    def of_files(cls, paths: Sequence[str | Path]) -> Decontamination:
        """Builds it from the users' turns of JSON lines with "turns", "messages" or "prompt"."""
        return cls(text for path in paths for where, line in read_lines(path) for text in user_turns(line, where))

    def has(self, texts: Iterable[str]) -> bool:
        """Whether one of `texts` shares a run of words, or of characters, with the texts that must not be trained on."""
        return bool(self.runs) and any(run in self.runs for text in texts for run in _runs(text))


def _runs(text: str) -> Iterator[str]:
    text = text.casefold()
    for parts, size in ((_WORD.findall(text), 1), (_CHARACTER.findall(text), CHARACTERS_A_WORD)):
        length = RUN * size
        if SHORTEST * size <= len(parts) < length:
            yield " ".join(parts)
        for start in range(len(parts) - length + 1):
            yield " ".join(parts[start : start + length])
