"""Turns chat files into training samples: read, render, tokenise, filter, and count what happened to every line."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from fledge.bench.loops import is_looping, loop_start
from fledge.files import hash_files
from fledge.tokenizer import Tokenizer
from fledge.training.data.chat_files import (
    Block,
    Conversation,
    DataError,
    Decontamination,
    TokenTurn,
    conversations_of,
    read_blocks,
)
from fledge.training.data.rendering import (
    THOUGHT,
    THOUGHT_END,
    Answer,
    ChatFormat,
    TemplateError,
    is_open_thought,
    split_thought,
)
from fledge.training.data.samples import Sample, SampleSet, key_of
from fledge.training.data.templates import Augmentation, Choice
from fledge.training.data.workers import Processes, num_cores

# Part of every cache key. Raise it when the same input would give different samples.
_CACHE_VERSION = 6

# A process starts within two seconds and makes samples from about 20 MB/s.
MIN_BYTES_FOR_PROCESSES = 1 << 26
MAX_PROCESSES = 16


@dataclass
class DataReport:
    """Counts of what happened to the data; everything that is dropped is counted here."""

    conversations: int = 0
    kept: int = 0
    looping: int = 0  # conversations cut where the first loop of an answer begins
    contaminated: int = 0  # share text with the files of `decontaminate`
    empty: int = 0  # without an assistant's answer to learn from
    refused: int = 0  # refused by the chat template
    first_refusal: str = ""
    too_long_dropped: int = 0
    truncated: int = 0  # cut at max_length
    truncated_tokens: int = 0  # answer tokens lost by truncation
    without_text: int = 0  # only token ids, which another chat template cannot render again
    augmented: int = 0
    not_augmented: int = 0  # chosen for augmentation, but without text or refused by the template: kept unchanged
    tokens: int = 0
    answer_tokens: int = 0

    def add(self, later: DataReport) -> None:
        """Adds the counts of the data that follows."""
        for field in fields(self):
            if field.name != "first_refusal":
                setattr(self, field.name, getattr(self, field.name) + getattr(later, field.name))
        self.first_refusal = self.first_refusal or later.first_refusal

    def __str__(self) -> str:
        notes = {
            "looping answers cut off": self.looping,
            "left out for overlap with the evaluation": self.contaminated,
            "empty": self.empty,
            "refused by the chat template": self.refused,
            "dropped as too long (conversation or prompt)": self.too_long_dropped,
            f"too long, truncated ({self.truncated_tokens:,} answer tokens lost)": self.truncated,
            "with token ids only, unaffected by data.chat_template": self.without_text,
            "rendered differently (augmentation)": self.augmented,
            "unchanged (augmentation not possible)": self.not_augmented,
        }
        text = f"{self.kept:,} of {self.conversations:,} conversations kept: {self.tokens:,} tokens, "
        text += f"{self.answer_tokens:,} of them answers"
        text += "".join(f"; {count:,} {what}" for what, count in notes.items() if count)
        return text + (f" (first refusal: {self.first_refusal})" if self.first_refusal else "")


# --- tokenising -----------------------------------------------------------------------------------------------------


def tokenize_conversation(conversation: Conversation, chat: ChatFormat) -> Sample:
    """Returns token ids with a loss on exactly what the assistant wrote, including its end-of-turn token.

    If no other chat template is given, the exact ids that the target saw and produced are used where they are known.
    """
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
    # Earlier answers that are not among `turns` have their loss in a conversation of their own.
    answers = [Answer(has_loss=False)] * (num_answers - len(answers)) + answers
    opened = bool(turns) and chat.tokenizer.decode(turns[-1].prompt_ids[-8:]).rstrip().endswith(THOUGHT)
    learnt = [message for message in messages if message["role"] == "assistant"][-max(1, len(turns)) :]
    if any(is_open_thought(message) or (opened and THOUGHT_END not in message["content"]) for message in learnt):
        raise TemplateError("an answer was cut off inside its thought, which templates would close; it cannot be rendered")
    if choice.template is None:
        rendered = chat.render(messages, conversation.options)
        if turns:
            chat.require_prompt(rendered, messages, conversation.options)
        return chat.tokens(rendered, answers)
    with_parts = any({"tool_calls", "reasoning_content"} & message.keys() for message in messages)
    if "tools" in conversation.options or with_parts or opened:
        raise TemplateError("only the model's own chat template can render tools and reasoning")
    past = [split_thought(message) for message in messages[: -len(learnt)]]  # thoughts of earlier turns are dropped
    messages = [*({"role": one["role"], "content": one["content"]} for one in past), *messages[-len(learnt) :]]
    eos = chat.tokenizer.eos_token_ids
    rendered = choice.template.render(messages, (chat.tokenizer.token(eos[0]) or "") if eos else "")
    return chat.tokens(rendered, answers, bos=True)


def _prompt_key(conversation: Conversation) -> int | None:
    """Returns a key of the user's first message, independent of the answer, the template and the system prompt."""
    said = next((message["content"] for message in conversation.messages if message["role"] == "user"), None)
    return None if said is None else key_of(" ".join(said.casefold().split()).encode())


# The part of a looping answer before the loop is kept if it has at least this many tokens.
MIN_BEFORE_LOOP = 24


def _without_loops(sample: Sample, report: DataReport) -> Sample:
    """Cuts a sample where its first loop begins; later text was written under the loop's influence."""
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
        except TemplateError:  # for example, a template that does not take system prompts
            pass
        report.not_augmented += 1
    return tokenize_conversation(conversation, chat)


# --- the whole data set ---------------------------------------------------------------------------------------------


@dataclass
class SampleWork:
    """Makes samples of conversations, in this process or in a worker process. A worker reads a block first, and makes its
    samples once the number of conversations before it is known (augmentation and `limit` depend on it)."""

    tokenizer: Tokenizer
    chat_template: str | None
    max_length: int | None
    long: str
    augmentation: Augmentation
    remove_loops: bool
    limit: int | None
    decontamination: Decontamination

    def __post_init__(self) -> None:
        self._chat = ChatFormat(self.tokenizer, self.chat_template)
        self._vocab_size = self.tokenizer.vocab_size
        self._waiting: list[Conversation] = []
        self._problem: DataError | None = None  # the error of the line after the conversations in `_waiting`

    def __reduce__(self) -> tuple:
        return SampleWork, tuple(getattr(self, field.name) for field in fields(self))

    def read(self, block: Block) -> int:
        """Parses a block and returns the number of its conversations. They are kept for `make`, and so is an error in it."""
        self._waiting, self._problem = [], None
        try:
            self._waiting.extend(conversations_of(block))
        except DataError as error:
            self._problem = error
        return len(self._waiting)

    def make(self, first_index: int) -> tuple[SampleSet, DataReport]:
        """Makes the samples of the block that was read last."""
        room = None if self.limit is None else max(0, self.limit - first_index)
        made = self.samples(self._waiting[:room], first_index)
        if self._problem is not None and (room is None or len(self._waiting) < room):
            raise self._problem
        return made

    def samples(self, conversations: Iterable[Conversation], first_index: int = 0) -> tuple[SampleSet, DataReport]:
        report = DataReport()
        return SampleSet.from_samples(self._samples(conversations, first_index, report)), report

    def _samples(self, conversations: Iterable[Conversation], first_index: int, report: DataReport) -> Iterator[Sample]:
        as_it_is, varied = Choice(), self.augmentation.active
        for index, conversation in enumerate(conversations, first_index):
            report.conversations += 1
            report.without_text += self.chat_template is not None and not conversation.messages
            if self.decontamination.has(self._asked(conversation)):
                report.contaminated += 1
                continue
            choice = self.augmentation.choose(index) if varied else as_it_is
            try:
                sample = _augment(conversation, self._chat, choice, report)
            except TemplateError as error:
                report.refused += 1
                report.first_refusal = report.first_refusal or f"{conversation.where}: {error}"
                continue
            if sample.tokens.size and int(sample.tokens.max()) >= self._vocab_size:
                raise DataError(
                    f"{conversation.where}: token id {int(sample.tokens.max())} is outside the tokenizer's "
                    f"{self._vocab_size} ids; the answers were made with another model"
                )
            loops_before = report.looping
            if self.remove_loops:
                sample = _without_loops(sample, report)
            if not sample.loss_mask[1:].any():  # the first token cannot be predicted
                report.empty += report.looping == loops_before
                continue
            if self.max_length is not None and len(sample) > self.max_length:
                cut = Sample(sample.tokens[: self.max_length], sample.loss_mask[: self.max_length])
                if self.long == "drop" or not cut.loss_mask[1:].any():
                    report.too_long_dropped += 1
                    continue
                report.truncated += 1
                report.truncated_tokens += int(sample.loss_mask.sum() - cut.loss_mask.sum())
                sample = cut
            yield replace(sample, prompt_key=_prompt_key(conversation))

    def _asked(self, conversation: Conversation) -> Iterator[str]:
        if not conversation.messages:
            return (self.tokenizer.decode(turn.prompt_ids) for turn in conversation.turns)
        return (message["content"] for message in conversation.messages if message["role"] == "user")


def load_samples(
    paths: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_length: int | None = None,
    long: Literal["truncate", "drop"] = "truncate",
    chat_template: str | None = None,
    augmentation: Augmentation | None = None,
    remove_loops: bool = True,
    limit: int | None = None,
    decontaminate: Sequence[str | Path] = (),
    cache_dir: str | Path | None = None,
    processes: int | None = None,
) -> tuple[SampleSet, DataReport]:
    """Loads all samples of the files, in order. With `cache_dir`, a second call with equal input reads them from the cache.

    `limit`: number of conversations to read. `decontaminate`: files of prompts; a conversation is left out if its user says
    thirteen consecutive words of one of them. `processes`: worker processes; None: decided by the size of the files. The
    samples do not depend on it.
    """
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    assert long in ("truncate", "drop")
    if chat_template is not None:
        ChatFormat(tokenizer, chat_template).require_template()
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
            data_hash(decontaminate) if decontaminate else "",
        ]
        key = json.dumps([_CACHE_VERSION, data_hash(files), tokenizer_hash(tokenizer), *settings])
        cache = Path(cache_dir) / f"samples-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
        if cache.is_file():
            samples, extra = SampleSet.load(cache)
            return samples, DataReport(**extra)

    decontamination = Decontamination.of_files(decontaminate)
    work = SampleWork(tokenizer, chat_template, max_length, long, augmentation, remove_loops, limit, decontamination)
    blocks = chain.from_iterable(map(read_blocks, files))
    if processes is None:
        processes = _num_processes(files, limit)
    if processes:
        samples, report = _in_processes(work, blocks, processes)
    else:
        samples, report = work.samples(islice(chain.from_iterable(map(conversations_of, blocks)), limit))
    if not len(samples):
        raise DataError(f"{', '.join(map(str, files))}: no sample is left to train on; {report}")
    report.kept, report.tokens = len(samples), len(samples.tokens)
    report.answer_tokens = int(samples.loss_mask.sum())
    if cache is not None:
        samples.save(cache, **asdict(report))
    return samples, report


def _num_processes(paths: Sequence[Path], limit: int | None) -> int:
    """Returns the number of worker processes to use; 0: work in this process."""
    size = sum(path.stat().st_size * (4 if path.suffix == ".gz" else 1) for path in paths if path.is_file())
    if limit is not None:
        size = min(size, limit * 4096)  # about the bytes of a conversation of 300 tokens with text and ids
    processes = min(num_cores(), MAX_PROCESSES)
    return processes if processes > 1 and size >= MIN_BYTES_FOR_PROCESSES else 0


def _in_processes(work: SampleWork, blocks: Iterable[Block], count: int) -> tuple[SampleSet, DataReport]:
    """Makes the samples in worker processes, collected in order, so that sums and the first error are those of one process."""
    parts, report = [], DataReport()
    pending: deque[Future[tuple[SampleSet, DataReport]]] = deque()
    workers = Processes(work, count, ahead=2 * count)

    def take() -> None:
        samples, what_became = pending.popleft().result()
        parts.append(samples)
        report.add(what_became)

    try:
        first_index: Future = Future()
        first_index.set_result(0)
        for block in blocks:
            next_index: Future = Future()
            pending.append(workers.submit(_samples_of, workers, block, first_index, next_index))
            first_index = next_index
            if len(pending) >= workers.ahead:
                take()
            if work.limit is not None and report.conversations >= work.limit:
                break
        while pending:
            take()
    finally:
        workers.close()
    return SampleSet.joined(parts), report


def _samples_of(workers: Processes, block: Block, first_index: Future, next_index: Future) -> tuple[SampleSet, DataReport]:
    """Makes a block's samples in a worker's thread. No deadlock: the blocks that it waits for were started before it."""
    try:
        num_conversations = workers.call("read", block)
        first = first_index.result()
        next_index.set_result(first + num_conversations)
    except BaseException as error:
        next_index.set_exception(error)  # otherwise the blocks after this one would wait forever
        raise
    return workers.call("make", first)


# --- identity -------------------------------------------------------------------------------------------------------


def data_hash(paths: str | Path | Sequence[str | Path]) -> str:
    """Returns the SHA-256 over the contents of the files, in order."""
    paths = [paths] if isinstance(paths, str | Path) else paths
    for path in paths:
        if not Path(path).is_file():
            raise DataError(f"{path}: there is no such file")
    return hash_files(paths)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Returns the SHA-256 over the vocabulary in order of the ids: equal hashes mean equal ids."""
    tokens = [tokenizer.token(token_id) for token_id in range(tokenizer.vocab_size)]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
