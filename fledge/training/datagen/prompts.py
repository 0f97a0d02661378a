"""The input and output files of `fledge regenerate`: prompts and answers."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fledge.files import write_atomically
from fledge.training.data.chat_files import DataError, parse_messages, parse_options, read_lines, user_turns
from fledge.training.data.rendering import Message, Options


@dataclass(frozen=True)
class Prompt:
    """The user's turns of a conversation, which the target answers one by one; or a conversation to continue."""

    id: str
    turns: tuple[str, ...]
    system: str = ""
    messages: tuple[Message, ...] = ()  # of a conversation with tools: unchanged, up to the user's or tool's message to answer
    source: str = ""
    options: Options = field(default_factory=dict)  # further arguments of the chat template: tools, enable_thinking


def prompt_id(parts: Sequence[str]) -> str:
    """Returns an id for a prompt without one: the same for the same text."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_prompts(path: str | Path) -> Iterator[Prompt]:
    """Reads {"turns": [user, user, …]}, {"messages": […]} (answers in it are ignored) and {"prompt": "…"}.

    Messages with a tool's result cannot be answered again turn by turn, because the target may call other tools: they are kept
    up to the last message of a user or tool, which is answered.
    A line may also have `id`, `system`, `source`, `tools` and `chat_template_kwargs`.
    """
    for where, line in read_lines(path):
        system, kept = line.get("system") or "", ()
        turns = user_turns(line, where)
        if "messages" in line:
            messages = parse_messages(line["messages"], where)
            if unknown := {message["role"] for message in messages} - {"system", "user", "assistant", "tool"}:
                raise DataError(f"{where}: messages of {', '.join(sorted(unknown))} cannot be answered again")
            if any(message["role"] == "tool" for message in messages):
                last = max(i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
                given = () if not system or messages[0]["role"] == "system" else ({"role": "system", "content": system},)
                kept, system = (*given, *messages[: last + 1]), ""
            else:
                system = system or "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        if not turns or not all(turn.strip() for turn in turns):
            raise DataError(f"{where}: a prompt needs one or more user turns with text, none of them empty")
        name = line.get("id")
        options = parse_options(line, where)
        extra = [json.dumps(part, sort_keys=True) for part in (options, kept) if part]
        yield Prompt(
            id=prompt_id([system, *turns, *extra]) if name is None else str(name),
            turns=tuple(turns),
            system=system,
            messages=kept,
            source=str(line.get("source") or ""),
            options=options,
        )


class AnswerFile:
    """A JSON-lines file to which answers are appended as they finish; a stopped or killed run can continue it.

    `<name>.settings.json` records how the answers were made, so that one file never mixes different settings.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        if self.path.suffix == ".gz":
            raise DataError(f"{self.path}: answers are appended as they finish, which .gz does not allow; use .jsonl")
        self.settings_path = self.path.with_name(self.path.name + ".settings.json")
        self.done: set[str] = set()
        self._settings = settings
        self._file: IO[str] | None = None
        self._writing = threading.Lock()

    def __enter__(self) -> AnswerFile:
        if self.path.is_file() and self.path.stat().st_size:
            self._check_settings()
            self._drop_torn_line()
            self.done = {self._id(where, line) for where, line in read_lines(self.path)}
        content = json.dumps(self._settings, indent=2).encode() + b"\n"
        write_atomically(self.settings_path, lambda file: file.write(content))
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def append(self, lines: Sequence[tuple[str, str]]) -> None:
        """Appends finished conversations, each given as id and line. May be called from any thread."""
        assert self._file is not None
        with self._writing:
            self._file.write("".join(line for _, line in lines))
            self._file.flush()
            self.done.update(name for name, _ in lines)

    def _check_settings(self) -> None:
        if not self.settings_path.is_file():
            raise DataError(
                f"{self.path} exists, but {self.settings_path.name} does not, so it cannot be continued; "
                "give another output file"
            )
        before = json.loads(self.settings_path.read_text())
        for name, value in self._settings.items():
            if before.get(name) != value:
                was, now = (str(text)[:60] for text in (before.get(name), value))
                raise DataError(
                    f"{self.path} was started with {name} {was!r}, now it is {now!r}; give another output file, "
                    "or use the same settings"
                )

    def _drop_torn_line(self) -> None:
        """Removes an incomplete last line, which a killed run may leave."""
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        os.truncate(self.path, end)

    @staticmethod
    def _id(where: str, line: dict[str, Any]) -> str:
        if "id" not in line or "turns_ids" not in line:
            raise DataError(f"{where}: not an answer of fledge regenerate; give another output file")
        return line["id"]
