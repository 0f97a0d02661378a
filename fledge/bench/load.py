"""Puts load on any OpenAI-compatible server and measures it.

Figures: TTFT (time to first token), TPOT (time per output token after the first), ITL (time between arrivals of text),
tokens/s per user (1 / TPOT, the median over requests) and tokens/s in total. Acceptance is read from /metrics before and after.

An arrival is one read of the socket. If the server is fast or the client is behind, one read has many events: they arrived
together, and the client cannot see the decoding time of the tokens in the first read. Timing each event separately once gave
34,324 tokens/s per user for a stream of a few thousand.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import httpx
import numpy as np

from fledge.bench.load_client import Conversation, LoadSettings, Outcome, Sample, authorization, run_users
from fledge.errors import UserError, printable

__all__ = ["Acceptance", "LoadReport", "LoadSettings", "Sample", "run_level"]

PERCENTILES = (50, 90, 99)
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SAMPLE = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$")
# One client process can read about this many streams of a fast server.
USERS_A_PROCESS = 16


@dataclass(frozen=True)
class Acceptance:
    """A server's counts of drafts and of drafted and accepted tokens."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    accepted_at: tuple[float, ...] = ()

    def since(self, before: Acceptance) -> Acceptance:
        earlier = [*before.accepted_at, *[0.0] * (len(self.accepted_at) - len(before.accepted_at))]
        at = tuple(new - old for new, old in zip(self.accepted_at, earlier, strict=True))
        return Acceptance(self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted, at)

    @property
    def length(self) -> float | None:
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def by_position(self) -> list[float]:
        return [count / self.drafts for count in self.accepted_at] if self.drafts else []

    @classmethod
    def parse(cls, metrics: str) -> Acceptance:
        totals: dict[str, float] = {}
        at: dict[int, float] = {}
        for line in metrics.splitlines():
            found = SAMPLE.match(line)
            if found is None:
                continue
            name, labels, value = found[1], found[2] or "", _number(found[3])
            position = re.search(r'position="(\d{1,3})"', labels)  # no server drafts 1,000 tokens
            if name == ACCEPTED_AT and position is not None:
                at[int(position[1])] = at.get(int(position[1]), 0.0) + value
            elif name in (DRAFTS, DRAFTED, ACCEPTED):
                totals[name] = totals.get(name, 0.0) + value
        by_position = tuple(at.get(position, 0.0) for position in range(max(at, default=-1) + 1))
        return cls(totals.get(DRAFTS, 0.0), totals.get(DRAFTED, 0.0), totals.get(ACCEPTED, 0.0), by_position)


def _number(text: str) -> float:
    """The text as a number; 0 if it is not a finite number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


@dataclass(frozen=True)
class LoadReport:
    """The results of one level of concurrency."""

    concurrency: int
    seconds: float
    samples: list[Sample]
    acceptance: Acceptance

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error is not None]

    @property
    def output_tokens(self) -> int:
        return sum(sample.completion_tokens for sample in self.good)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def per_user_tokens_per_second(self) -> float:
        """The speed that the reader of one stream sees: the median of 1 / TPOT over requests."""
        rates = [1 / tpot for sample in self.good if (tpot := sample.token_seconds)]
        return float(np.median(rates)) if rates else 0.0

    @property
    def mean_per_user_tokens_per_second(self) -> float:
        """The mean, weighted by time: tokens after the first, divided by the time from first to last, over all requests."""
        timed = [sample for sample in self.good if sample.token_seconds is not None]
        seconds = sum(sample.decode_seconds for sample in timed)
        return sum(sample.decode_tokens for sample in timed) / seconds if seconds else 0.0

    def milliseconds(self, name: str) -> dict[str, float]:
        """Mean and percentiles of `ttft`, `tpot`, `itl` or `latency`."""
        by_name: dict[str, Sequence[float | None]] = {
            "ttft": [sample.first_token_seconds for sample in self.good],
            "tpot": [sample.token_seconds for sample in self.good],
            "itl": [gap for sample in self.good for gap in sample.gaps],
            "latency": [sample.seconds for sample in self.good],
        }
        present = [1000 * value for value in by_name[name] if value is not None]
        if not present:
            return {}
        return {"mean": float(np.mean(present))} | {f"p{p}": float(np.percentile(present, p)) for p in PERCENTILES}

    def to_dict(self) -> dict[str, object]:
        acceptance = asdict(self.acceptance) | {"length": self.acceptance.length, "by_position": self.acceptance.by_position}
        return {
            "concurrency": self.concurrency,
            "seconds": self.seconds,
            "requests": len(self.samples),
            "errors": self.errors,
            "prompt_tokens": sum(sample.prompt_tokens for sample in self.good),
            "output_tokens": self.output_tokens,
            "requests_per_second": len(self.good) / self.seconds if self.seconds else 0.0,
            "tokens_per_second": self.tokens_per_second,
            "per_user_tokens_per_second": self.per_user_tokens_per_second,
            "mean_per_user_tokens_per_second": self.mean_per_user_tokens_per_second,
            **{f"{name}_ms": self.milliseconds(name) for name in ("ttft", "tpot", "itl", "latency")},
            "acceptance": acceptance,
        }


def default_processes(concurrency: int) -> int:
    """The number of client processes: at most half of the cores, which leaves the others to the server."""
    return max(1, min((os.cpu_count() or 1) // 2, math.ceil(concurrency / USERS_A_PROCESS)))


async def run_level(
    settings: LoadSettings,
    conversations: Sequence[Conversation],
    concurrency: int,
    on_done: Callable[[int], None] = lambda _: None,
) -> LoadReport:
    """Sends every conversation once, at most `concurrency` at a time. `on_done`: called with the number of answers so far."""
    headers = authorization(settings.api_key)
    async with httpx.AsyncClient(base_url=settings.url, headers=headers, timeout=settings.timeout) as client:
        settings = replace(settings, model=settings.model or await _first_model(client))
        before = await read_acceptance(client) or Acceptance()
        num_processes = min(settings.processes or default_processes(concurrency), concurrency)
        if num_processes == 1:
            outcome = await run_users(settings, conversations, concurrency, on_done)
        else:
            outcome = await asyncio.to_thread(_run_processes, settings, conversations, concurrency, num_processes)
            on_done(len(outcome.samples))
        after = await read_acceptance(client)
    acceptance = after.since(before) if after is not None else Acceptance()
    return LoadReport(concurrency, outcome.end - outcome.begin, outcome.samples, acceptance)


def _run_processes(
    settings: LoadSettings, conversations: Sequence[Conversation], concurrency: int, num_processes: int
) -> Outcome:
    """Runs several client processes with equal parts of users and conversations; all start when the last one is ready.

    Their times are comparable because all use the machine's monotonic clock.
    """
    if settings.request_rate is not None:
        settings = replace(settings, request_rate=settings.request_rate / num_processes)
    command = [sys.executable, "-m", "fledge.bench.load_client"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(num_processes)]
    pipes = [(process.stdin, process.stdout) for process in processes if process.stdin and process.stdout]  # all have both
    try:
        for number, (stdin, _) in enumerate(pipes):
            users = len(range(number, concurrency, num_processes))
            part = list(conversations[number::num_processes])
            pickle.dump((replace(settings, seed=settings.seed + number), part, users), stdin)
            stdin.flush()
        if any(stdout.readline() != b"ready\n" for _, stdout in pipes):
            raise UserError("a process of the load client failed; its error is above")
        for stdin, _ in pipes:
            stdin.write(b"go\n")
            stdin.flush()
        outcomes: list[Outcome] = [pickle.load(stdout) for _, stdout in pipes]
    except (EOFError, BrokenPipeError):
        raise UserError("a process of the load client failed; its error is above") from None
    finally:
        for process, (stdin, stdout) in zip(processes, pipes, strict=True):
            stdin.close()
            stdout.close()
            process.wait()
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    return Outcome(samples, min(one.begin for one in outcomes), max(one.end for one in outcomes))


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        hint = "; give --api-key" if error.response.status_code == 401 else ""
        raise UserError(f"{client.base_url}: /v1/models answers {error.response.status_code}{hint}") from None
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        reason = printable(str(error) or type(error).__name__, 200)
        raise UserError(f"{client.base_url} is not an OpenAI-compatible server, or is not running ({reason})") from None


async def read_acceptance(client: httpx.AsyncClient) -> Acceptance | None:
    """Reads the counts from /metrics; None if the server does not count drafts."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return None
    counts = response.status_code == 200 and "spec_decode_num_drafts" in response.text
    return Acceptance.parse(response.text) if counts else None
