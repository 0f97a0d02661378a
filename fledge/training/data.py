"""Chat files to training samples: read, render, tokenise, filter, and say what became of every line."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fledge.errors import UserError
from fledge.tokenizer import Tokenizer
from fledge.training.loops import is_looping, loop_start
from fledge.training.rendering import Answer, ChatFormat, Message, TemplateError
from fledge.training.samples import Sample, SampleSet
from fledge.training.templates import Augmentation, Choice

# Part of every cache key: raise it when the same input would give other samples.
_CACHE_VERSION = 2  # raised when the same data would give other samples

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool", "function": "tool",
}  # fmt: skip


class DataError(UserError):
    """Training data that cannot be used; names the file and, where there is one, the line."""


@dataclass(frozen=True)
class TokenTurn:
    """One turn as the target saw it and answered it, id by id."""

    prompt_ids: Sequence[int]  # the whole prompt, earlier turns included
    answer_ids: Sequence[int]  # with the end-of-turn id, unless the answer was cut off


@dataclass(frozen=True)
class Conversation:
    """Messages, token ids, or both. With both, `turns` are those of the last `len(turns)` assistant messages."""

    messages: tuple[Message, ...] = ()
    turns: tuple[TokenTurn, ...] = ()
    where: str = ""  # "file, line n"


@dataclass
class DataReport:
    """What became of the data: nothing is dropped without being counted here."""

    conversations: int = 0
    kept: int = 0
    looping: int = 0  # answers cut where their loop begins, with all that follows them
    empty: int = 0  # no assistant's answer (left) to learn from
    refused: int = 0  # the chat template does not take them
    first_refusal: str = ""
    too_long_dropped: int = 0
    too_long_chunked: int = 0  # kept whole here; the loader cuts them into sequences
    augmented: int = 0
    not_augmented: int = 0  # chosen for it, but without text or refused by the template: kept as they are
    tokens: int = 0
    answer_tokens: int = 0

    def __str__(self) -> str:
        notes = {
            "looping answers cut off": self.looping,
            "empty": self.empty,
            "refused by the chat template": self.refused,
            "too long, dropped": self.too_long_dropped,
            "too long, to be chunked": self.too_long_chunked,
            "rendered differently (augmentation)": self.augmented,
            "left as they are (augmentation not possible)": self.not_augmented,
        }
        text = f"{self.kept:,} of {self.conversations:,} conversations kept: {self.tokens:,} tokens, "
        text += f"{self.answer_tokens:,} of them answers"
        text += "".join(f"; {count:,} {what}" for what, count in notes.items() if count)
        return text + (f" (first refusal: {self.first_refusal})" if self.first_refusal else "")


# --- reading --------------------------------------------------------------------------------------------------------


def read_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) for each line of a .jsonl or .jsonl.gz; blank lines are passed over."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
                if not isinstance(value, dict):
                    raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
                yield where, value
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}, after line {number}: cannot be read ({error})") from None


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Reads OpenAI messages, ShareGPT conversations and tokenised answers (as `fledge regenerate` writes them).

    A tokenised conversation comes as one, unless its template rewrote the earlier turns for a later prompt (some
    models drop old thinking): then each part that the target saw in one piece comes on its own.
    """
    for where, line in read_lines(path):
        if "prompt_ids" in line or "answer_ids" in line:
            yield Conversation(turns=(parse_turn(line, where),), where=where)
            continue
        if "messages" in line:
            messages = parse_messages(line["messages"], where)
        elif "conversations" in line:
            messages = _sharegpt(line["conversations"], where)
        else:
            raise DataError(
                f'{where}: none of "messages", "conversations" or "prompt_ids" + "answer_ids" is there; '
                f"found {', '.join(map(repr, line)) or 'an empty object'}"
            )
        yield from _split(messages, line.get("turns_ids"), where)


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: messages must be a list")
    return tuple(_message(entry, "role", "content", where) for entry in value)


def parse_turn(value: Any, where: str) -> TokenTurn:
    ids = []
    for name in ("prompt_ids", "answer_ids"):
        part = value.get(name) if isinstance(value, dict) else None
        if not isinstance(part, list) or not all(type(i) is int and i >= 0 for i in part):
            raise DataError(f"{where}: {name} must be a list of token ids")
        ids.append(part)
    return TokenTurn(*ids)


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
    return {"role": entry[role_key], "content": content}


def _split(messages: tuple[Message, ...], turns_ids: Any, where: str) -> Iterator[Conversation]:
    if turns_ids is None:
        yield Conversation(messages, where=where)
        return
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not isinstance(turns_ids, list) or len(turns_ids) != len(ends):
        raise DataError(f"{where}: turns_ids must have one entry for each of the {len(ends)} assistant messages")
    joined: list[TokenTurn] = []
    for number, value in enumerate(turns_ids):
        turn = parse_turn(value, where)
        if joined:
            seen = [*joined[-1].prompt_ids, *joined[-1].answer_ids]
            if list(turn.prompt_ids[: len(seen)]) != seen:
                yield Conversation(messages[: ends[number - 1]], tuple(joined), where)
                joined = []
        joined.append(turn)
    if joined:
        yield Conversation(messages[: ends[-1]], tuple(joined), where)


# --- tokenising -----------------------------------------------------------------------------------------------------


def tokenize_conversation(
    conversation: Conversation, tokenizer: Tokenizer | ChatFormat, chat_template: str | None = None
) -> Sample:
    """Token ids, with a loss on exactly what the assistant wrote, its end-of-turn token included.

    Without another `chat_template`, the ids that the target itself saw and produced are used where they are known.
    """
    chat = tokenizer if isinstance(tokenizer, ChatFormat) else ChatFormat(tokenizer, chat_template)
    if conversation.turns and (chat.chat_template is None or not conversation.messages):
        return _exact(conversation.turns)
    return _rendered(conversation, chat, Choice())


def _exact(turns: Sequence[TokenTurn]) -> Sample:
    tokens = np.array([*turns[-1].prompt_ids, *turns[-1].answer_ids], np.int32)
    mask = np.zeros(len(tokens), bool)
    for turn in turns:
        mask[len(turn.prompt_ids) : len(turn.prompt_ids) + len(turn.answer_ids)] = True
    return Sample(tokens, mask)


def _rendered(conversation: Conversation, chat: ChatFormat, choice: Choice) -> Sample:
    messages = choice.messages(conversation.messages)
    num_answers = sum(message["role"] == "assistant" for message in messages)
    turns = conversation.turns
    answers = [Answer(ids=turn.answer_ids) for turn in turns] or [Answer()] * num_answers
    # Earlier answers that are not among `turns` were learnt from in a conversation of their own.
    answers = [Answer(has_loss=False)] * (num_answers - len(answers)) + answers
    if choice.template is None:
        return chat.tokens(chat.render(messages), answers)
    eos = chat.tokenizer.eos_token_ids
    rendered = choice.template.render(messages, chat.tokenizer.token(eos[0]) if eos else "")
    return chat.tokens(rendered, answers, bos=True)


# A looping answer's own text, before the loop, is worth keeping from this length on.
MIN_BEFORE_LOOP = 24


def _without_loops(sample: Sample, report: DataReport) -> Sample:
    """Cuts where the first loop begins: what follows it was written under its influence."""
    end = 0
    for start, stop in sample.answers():
        loop = loop_start(sample.tokens[start:stop])
        if loop is not None:
            report.looping += 1
            if loop >= MIN_BEFORE_LOOP and not is_looping(sample.tokens[start : start + loop]):
                end = start + loop
            return Sample(sample.tokens[:end], sample.loss_mask[:end])
        end = stop
    return sample


def _augment(conversation: Conversation, chat: ChatFormat, choice: Choice, report: DataReport) -> Sample:
    if not choice.changes_nothing:
        try:
            if conversation.messages:
                sample = _rendered(conversation, chat, choice)
                report.augmented += 1
                return sample
        except TemplateError:  # a template without system prompts, say
            pass
        report.not_augmented += 1
    return tokenize_conversation(conversation, chat)


# --- the whole data set ---------------------------------------------------------------------------------------------


def load_samples(
    paths: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_length: int | None = None,
    long: Literal["chunk", "drop"] = "chunk",
    chat_template: str | None = None,
    augmentation: Augmentation | None = None,
    remove_loops: bool = True,
    limit: int | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[SampleSet, DataReport]:
    """All samples of the files, in order. With `cache_dir`, the second call with equal input reads them from there."""
    paths = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if long not in ("chunk", "drop"):
        raise DataError(f'long samples can be handled by "chunk" or "drop", not {long!r}')
    augmentation = augmentation or Augmentation()
    cache = None
    if cache_dir is not None:
        settings = [
            max_length,
            long,
            chat_template,
            tokenizer.chat_template,
            astuple(augmentation),
            remove_loops,
            limit,
        ]
        key = json.dumps([_CACHE_VERSION, data_hash(paths), tokenizer_hash(tokenizer), *settings])
        cache = Path(cache_dir) / f"samples-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
        if cache.is_file():
            samples, extra = SampleSet.load(cache)
            return samples, DataReport(**extra)

    report = DataReport()
    chat = ChatFormat(tokenizer, chat_template)
    samples = SampleSet.from_samples(_samples(paths, chat, max_length, long, augmentation, remove_loops, limit, report))
    if not len(samples):
        raise DataError(f"{', '.join(map(str, paths))}: no sample is left to train on; {report}")
    report.kept, report.tokens = len(samples), len(samples.tokens)
    report.answer_tokens = int(samples.loss_mask.sum())
    if cache is not None:
        samples.save(cache, **asdict(report))
    return samples, report


def _samples(
    paths: Sequence[Path],
    chat: ChatFormat,
    max_length: int | None,
    long: str,
    augmentation: Augmentation,
    remove_loops: bool,
    limit: int | None,
    report: DataReport,
) -> Iterator[Sample]:
    for conversation in (conversation for path in paths for conversation in read_conversations(path)):
        if limit is not None and report.conversations >= limit:
            return
        index = report.conversations
        report.conversations += 1
        try:
            sample = _augment(conversation, chat, augmentation.choose(index), report)
        except TemplateError as error:
            report.refused += 1
            report.first_refusal = report.first_refusal or f"{conversation.where}: {error}"
            continue
        if sample.tokens.size and int(sample.tokens.max()) >= chat.tokenizer.vocab_size:
            raise DataError(
                f"{conversation.where}: token id {int(sample.tokens.max())} is outside the tokenizer's "
                f"{chat.tokenizer.vocab_size} ids; the answers were made with another model"
            )
        loops_before = report.looping
        if remove_loops:
            sample = _without_loops(sample, report)
        if not sample.loss_mask[1:].any():  # a first token cannot be predicted
            report.empty += report.looping == loops_before
            continue
        if max_length is not None and len(sample) > max_length:
            if long == "drop":
                report.too_long_dropped += 1
                continue
            report.too_long_chunked += 1
        yield sample


# --- identity -------------------------------------------------------------------------------------------------------


def data_hash(paths: str | Path | Sequence[str | Path]) -> str:
    """SHA-256 over the contents of the files, in order."""
    paths = [paths] if isinstance(paths, str | Path) else paths
    digest = hashlib.sha256()
    for path in paths:
        if not Path(path).is_file():
            raise DataError(f"{path}: there is no such file")
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 over the vocabulary in order of the ids: equal hashes, equal ids."""
    tokens = [tokenizer.token(token_id) for token_id in range(tokenizer.vocab_size)]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
