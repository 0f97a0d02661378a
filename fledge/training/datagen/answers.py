"""Generates the answers for `fledge make` within a time limit, then splits them into training and held-out conversations.

With torchrun, each process of the first machine answers its share of the prompts, in its own files (answers.rank1.jsonl …).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fledge.devices import release_memory
from fledge.errors import UserError
from fledge.files import write_atomically
from fledge.tokenizer import Tokenizer
from fledge.training.context import Log
from fledge.training.datagen.prompts import read_prompts
from fledge.training.datagen.regenerate import AnswerGenerator, PromptsExhausted, regenerate
from fledge.training.distributed import DistributedContext
from fledge.training.make_plan import AnswerPart, MakePlan
from fledge.training.targets.endpoint import EndpointAnswers
from fledge.training.targets.states_client import StatesClient, launch_command

FIRST_ROUND = {"cuda": 2048, "cpu": 64}  # self-written prompts; later rounds are as large as the speed allows
ENDPOINT_REQUESTS = 64
MIN_ANSWERS, MIN_SECONDS = 8, 60.0  # fewest answers to train on and hold out; they may exceed a short budget by a minute
MIN_SHARE = 0.15  # of the total time that answers get at least, even if loading took long
BOTH = [{"enable_thinking": True}, {"enable_thinking": False}]  # options of the chat template
SIZED_LINES = 4096  # conversations whose tokens are counted; the rest are assumed to be similar


@dataclass
class Progress:
    """The completed parts and the seconds they took, stored in make.json."""

    path: Path
    settings: dict[str, Any]
    seconds: float = 0.0  # spent by earlier processes
    done: tuple[str, ...] = ()
    hours: float = 0.0  # time limit given to the process that trained last
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def load(cls, path: Path, settings: dict[str, Any]) -> Progress:
        if not path.is_file():
            return cls(path, settings)
        found = json.loads(path.read_text())
        for name, value in settings.items():
            if found["settings"].get(name) != value:
                raise UserError(
                    f"{path.parent}: was started with {name} {found['settings'].get(name)!r}, now it is {value!r}; give "
                    "another output folder, or use the same settings"
                )
        seconds, done = found["seconds"], tuple(found["done"])
        if "answers" not in done:  # that process was killed; it ran at least until its last answer
            last = max((file.stat().st_mtime for file in path.parent.glob("answers*.jsonl")), default=0.0)
            seconds += max(0.0, last - path.stat().st_mtime)
        return cls(path, settings, seconds, done, found["hours"])

    @property
    def spent(self) -> float:
        """Seconds spent so far by all processes, without training, whose time is in its checkpoints."""
        return self.seconds + time.monotonic() - self.began

    def save(self) -> None:
        record = {"settings": self.settings, "seconds": self.spent, "done": list(self.done), "hours": self.hours}
        write_atomically(self.path, lambda file: file.write(json.dumps(record, indent=2).encode() + b"\n"))

    def finish(self, part: str) -> None:
        self.done = (*self.done, part)
        self.save()


def answer(
    plan: MakePlan,
    shape: Any,
    tokenizer: Tokenizer | None,
    out: Path,
    progress: Progress,
    decontaminate: Sequence[Path],
    log: Log,
    dist: DistributedContext | None = None,
) -> None:
    """Writes all answers of the plan and splits them into training and held-out files. Called by all processes.

    `tokenizer`: None in processes that do not answer.
    """
    dist = dist or DistributedContext()
    device = f"cuda:{dist.local_rank}" if plan.device == "cuda" and dist.size > 1 else plan.device

    def write() -> _AnswerWriter | None:
        if dist.rank >= plan.num_answering:
            return None
        assert tokenizer is not None
        writer = _AnswerWriter(_generator(plan, shape, device), plan, tokenizer, out, progress, decontaminate, log, dist.rank)
        start = progress.spent
        left = max(plan.answer_seconds - start, MIN_SHARE * plan.seconds)
        for part in plan.answer_parts:
            writer.write_until(part, start + part.until * left)
        return writer

    writer = dist.on_each(write)
    # With a short budget on a busy machine: write the first few answers even if that exceeds the time limit.
    dist.on_first(lambda: writer and _num_answers(plan, out) < MIN_ANSWERS and writer.write_first(plan.answer_parts[0]))
    writer = None
    release_memory(torch.device(device))
    if plan.device != "cpu":
        log(f"GPU memory still reserved after writing the answers: {torch.cuda.memory_reserved(device) / 2**30:.1f} GiB")

    def finish() -> None:
        if (done := _num_answers(plan, out)) < MIN_ANSWERS:
            advice = "give more time (--hours) or more prompts (--prompts)"
            raise UserError(f"{out}: {done} answers are too few to train on; {advice}")
        split([found for part in plan.answer_parts if (found := _files(out, part))], out / "data")
        progress.finish("answers")

    dist.on_first(finish)


def _files(out: Path, part: AnswerPart) -> list[Path]:
    """Returns the first process's file and those of the others, including those of an earlier run with more processes."""
    own = out / part.file
    return [path for path in (own, *sorted(out.glob(f"{own.stem}.rank*.jsonl"))) if path.is_file()]


def _num_answers(plan: MakePlan, out: Path) -> int:
    return sum(num_lines(path) for part in plan.answer_parts for path in _files(out, part))


@dataclass
class _AnswerWriter:
    """Writes the answers of a plan's parts, each to its own file."""

    generator: AnswerGenerator
    plan: MakePlan
    tokenizer: Tokenizer
    out: Path
    progress: Progress
    decontaminate: Sequence[Path]
    log: Log
    rank: int = 0

    def _file(self, part: AnswerPart) -> Path:
        own = self.out / part.file
        return own.with_name(f"{own.stem}.rank{self.rank}.jsonl") if self.rank else own

    def write_until(self, part: AnswerPart, until: float) -> None:
        """Writes answers of one kind until `until` seconds are spent.

        All prompts of a file are answered in one call. Self-written prompts are made in rounds, because all prompts of a round
        are written before the first is answered. The size of a round depends on the time left and the speed so far.
        """
        before, began = num_lines(self._file(part)), time.monotonic()
        num_new, size = 0, FIRST_ROUND["cpu" if self.plan.device == "cpu" else "cuda"]
        while (left := until - self.progress.spent) > 0:
            if num_new:
                size = min(4 * num_new, max(16, int(num_new / (time.monotonic() - began) * left)))
            written = self.write(part, before + num_new + size if part.self_written else None, left)
            num_new += written
            if not part.self_written or not written:
                return

    def write_first(self, part: AnswerPart) -> None:
        """Writes answers until the part's file has MIN_ANSWERS, for at most MIN_SECONDS.

        Takes a few prompts at a time, so that a slow machine finishes some, and doubles their number each round: a file's first
        prompts may be duplicates, too long or contaminated.
        """
        deadline, limit = time.monotonic() + MIN_SECONDS, MIN_ANSWERS
        num_prompts = 0 if part.self_written else sum(1 for _ in read_prompts(str(self.plan.prompts)))
        while num_lines(self._file(part)) < MIN_ANSWERS and (left := deadline - time.monotonic()) > 0:
            self.write(part, limit, left)
            if limit >= num_prompts:
                return
            limit *= 2

    def write(self, part: AnswerPart, total: int | None, max_seconds: float) -> int:
        """Answers a file's first `total` prompts, or self-written ones until there are `total`, for at most `max_seconds`.

        Returns the number of new conversations.
        """
        file, plan = self._file(part), self.plan
        try:
            report = regenerate(
                self.generator,
                self.tokenizer,
                None if part.self_written else plan.prompts,
                file,
                max_tokens=plan.max_answer_tokens,
                temperature=part.temperature,
                seed=part.seed + 1009 * self.rank,  # self-written prompts differ between processes
                share=(self.rank, plan.num_answering),
                model=plan.model,
                template_options=BOTH if plan.thinking == "optional" else [{}],
                decontaminate=self.decontaminate,
                max_seconds=max_seconds,
                self_prompted=total if part.self_written else None,
                limit=total,
            )
            self.log(f"{file.name}: {report}")
            return report.conversations
        except PromptsExhausted as error:
            self.log(f"{file.name}: {error}")
            return 0
        finally:
            if not self.rank:
                self.progress.save()


def _generator(plan: MakePlan, shape: Any, device: str) -> AnswerGenerator:
    if plan.endpoint is not None:
        layers = (*plan.aux_layers, shape.num_layers)
        command = launch_command(plan.model, layers)
        client = StatesClient(plan.endpoint, layers, shape.hidden_size, plan.endpoint_states, command)
        return EndpointAnswers(client, ENDPOINT_REQUESTS)
    from fledge.engine.offline import answer_generator

    # Longer conversations are not trained on. But with longrope the engine's longest text selects the RoPE factors. Training
    # states, and a server with default settings, use the long factors, so the engine must too.
    longest, rope = plan.sequence_length, shape.rope
    if rope.kind == "longrope":
        longest = min(max(longest, rope.original_max_positions + 1), shape.max_positions)
    generator = answer_generator(plan.model, device=device, max_model_len=longest)
    generator.max_model_len = plan.sequence_length
    return generator


def num_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def split(parts: Sequence[Sequence[Path]], folder: Path) -> None:
    """Holds out a tenth of the prompts of the first part with answers, at most 64. The choice depends only on their ids.

    If two files of a part answer the same prompt, the first answer is used.
    """
    parts = [files for files in parts if any(path.stat().st_size for path in files)]
    ids = sorted(set(map(_id_of, _lines(parts[0]))), key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen = set(ids[: min(64, max(2, len(ids) // 10))])

    def write(target: Any, parts: Sequence[Sequence[Path]], wanted: bool) -> None:
        for files in parts:
            seen: set[str] = set()
            for line in _lines(files):
                name = _id_of(line)
                if name not in seen and (name in chosen) == wanted:
                    target.write(line)
                seen.add(name)

    write_atomically(folder / "held-out.jsonl", lambda file: write(file, parts[:1], True))
    write_atomically(folder / "train.jsonl", lambda file: write(file, parts, False))


def _lines(files: Sequence[Path]) -> Iterator[bytes]:
    for path in files:
        with path.open("rb") as file:
            yield from file


def _id_of(line: bytes) -> str:
    """Reads a line's id without parsing the rest, because a file of answers may have gigabytes."""
    found = re.match(rb'\{"id":\s*("(?:[^"\\]|\\.)*")', line)
    return json.loads(found[1]) if found else json.loads(line)["id"]


def sizes(path: Path) -> tuple[float, int]:
    """Estimates, from the first conversations, the number of tokens of all conversations and of the longest one."""
    num_tokens = num_bytes = longest = 0
    with path.open("rb") as file:
        for line in islice(file, SIZED_LINES):
            turn = json.loads(line)["turns_ids"][-1]
            size = len(turn["prompt_ids"]) + len(turn["answer_ids"])
            num_tokens, num_bytes, longest = num_tokens + size, num_bytes + len(line), max(longest, size)
    return num_tokens * path.stat().st_size / num_bytes, longest
