"""An asynchronous load client for any OpenAI-compatible server: ours, vLLM's, others.

Figures, by the names in use: TTFT (time to first token), TPOT (time per output token after the first), ITL (time between
arrivals of text), and tokens/s per user (one over TPOT, the median over requests) and in total. Acceptance is read from
/metrics before and after.

An arrival is one read of the socket. A fast server, or a client that is behind, gets many events in one read: they came
together, and the tokens of the first read have no decoding time that a client could see. Timing each event apart once
gave 34,324 tokens/s per user for a stream of a few thousand.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import httpx
import numpy as np

from fledge.errors import UserError

PERCENTILES = (50, 90, 99)
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SAMPLE = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$")


@dataclass(frozen=True)
class LoadSettings:
    url: str
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    request_rate: float | None = None  # requests a second, Poisson; None: as fast as the concurrency allows
    speculate: bool | None = None  # Fledge's extension; None: not sent
    seed: int = 0
    timeout: float = 600.0


@dataclass
class Sample:
    """One request as its caller saw it."""

    seconds: float = 0.0
    first_token_seconds: float | None = None
    gaps: list[float] = field(default_factory=list)  # between arrivals of text
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_arrival_share: float = 0.0  # of the text, in the first read; 0: not known, counted as one token
    error: str | None = None

    @property
    def decode_seconds(self) -> float:
        """From the first arrival of text to the last; 0 when all of it came together."""
        return 0.0 if self.first_token_seconds is None else self.seconds - self.first_token_seconds

    @property
    def decode_tokens(self) -> float:
        """Tokens that arrived in that time: all but those of the first read, at least one, by their share of the text."""
        return self.completion_tokens - max(1.0, self.first_arrival_share * self.completion_tokens)

    @property
    def token_seconds(self) -> float | None:
        """Time per output token after the first; None when the stream shows no time between two tokens."""
        if self.decode_seconds <= 0 or self.decode_tokens <= 0:
            return None
        return self.decode_seconds / self.decode_tokens


@dataclass(frozen=True)
class Acceptance:
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
            position = re.search(r'position="(\d{1,3})"', labels)  # a thousand would be more than anybody drafts
            if name == ACCEPTED_AT and position is not None:
                at[int(position[1])] = at.get(int(position[1]), 0.0) + value
            elif name in (DRAFTS, DRAFTED, ACCEPTED):
                totals[name] = totals.get(name, 0.0) + value
        by_position = tuple(at.get(position, 0.0) for position in range(max(at, default=-1) + 1))
        return cls(totals.get(DRAFTS, 0.0), totals.get(DRAFTED, 0.0), totals.get(ACCEPTED, 0.0), by_position)


def _number(text: str) -> float:
    """0 for what is no number, or not a finite one."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


@dataclass(frozen=True)
class LoadReport:
    """What one level of concurrency gave."""

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
        """What a reader of one stream sees: the median over requests of one over their TPOT."""
        rates = [1 / tpot for sample in self.good if (tpot := sample.token_seconds)]
        return float(np.median(rates)) if rates else 0.0

    @property
    def mean_per_user_tokens_per_second(self) -> float:
        """The mean, weighted by time: tokens after the first over the time from first to last, over all requests."""
        timed = [sample for sample in self.good if sample.token_seconds is not None]
        seconds = sum(sample.decode_seconds for sample in timed)
        return sum(sample.decode_tokens for sample in timed) / seconds if seconds else 0.0

    def milliseconds(self, name: str) -> dict[str, float]:
        """Mean and percentiles of `ttft`, `tpot`, `itl` or `latency`."""
        values = {
            "ttft": [sample.first_token_seconds for sample in self.good],
            "tpot": [sample.token_seconds for sample in self.good],
            "itl": [gap for sample in self.good for gap in sample.gaps],
            "latency": [sample.seconds for sample in self.good],
        }[name]
        present = [1000 * value for value in values if value is not None]
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


async def run_level(
    settings: LoadSettings,
    conversations: Sequence[Sequence[dict[str, str]]],
    concurrency: int,
    on_done: Callable[[Sample], None] = lambda _: None,
) -> LoadReport:
    """Sends every conversation once, at most `concurrency` at a time."""
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    chance = random.Random(settings.seed)
    waiting = iter(conversations)
    samples: list[Sample] = []
    next_start = time.perf_counter()

    async with httpx.AsyncClient(base_url=settings.url, headers=headers, limits=limits, timeout=settings.timeout) as client:
        model = settings.model or await _first_model(client)
        before = await _acceptance(client)

        async def user() -> None:
            nonlocal next_start
            for messages in waiting:
                if settings.request_rate is not None:
                    next_start += chance.expovariate(settings.request_rate)
                    await asyncio.sleep(max(0.0, next_start - time.perf_counter()))
                sample = await _ask(client, model, messages, settings)
                samples.append(sample)
                on_done(sample)

        begin = next_start = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(concurrency)))
        seconds = time.perf_counter() - begin
        acceptance = (await _acceptance(client)).since(before)
    return LoadReport(concurrency, seconds, samples, acceptance)


async def _ask(client: httpx.AsyncClient, model: str, messages: Sequence[dict[str, str]], settings: LoadSettings) -> Sample:
    body: dict[str, object] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.speculate is not None:
        body["speculate"] = settings.speculate
    sample = Sample()
    begin = last = time.perf_counter()
    characters = first_characters = 0
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                sample.error = f"status {response.status_code}: {text[:200]}"
                return sample
            rest = b""
            async for data in response.aiter_bytes():
                now, before = time.perf_counter(), characters
                *lines, rest = (rest + data).split(b"\n")
                for line in map(bytes.strip, lines):
                    if not line.startswith(b"data: ") or line == b"data: [DONE]":
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        sample.error = str(chunk["error"])[:200]
                        return sample
                    if usage := chunk.get("usage"):
                        sample.prompt_tokens = usage.get("prompt_tokens", 0)
                        sample.completion_tokens = usage.get("completion_tokens", 0)
                    characters += _num_characters(chunk)
                if characters == before:
                    continue
                if sample.first_token_seconds is None:
                    sample.first_token_seconds, first_characters = now - begin, characters
                else:
                    sample.gaps.append(now - last)
                last = now
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.seconds = last - begin  # to the last arrival of text: closing the stream is not decoding
    sample.first_arrival_share = first_characters / characters if characters else 0.0
    return sample


def _num_characters(chunk: dict) -> int:
    """How much text an event carries, thoughts and tool calls included."""
    total = 0
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        total += len(delta.get("content") or "") + len(delta.get("reasoning") or delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            total += len(function.get("name") or "") + len(function.get("arguments") or "")
    return total


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except httpx.HTTPStatusError as error:
        hint = "; give --api-key" if error.response.status_code == 401 else ""
        raise UserError(f"{client.base_url}: /v1/models answers {error.response.status_code}{hint}") from None
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{client.base_url} is not an OpenAI-compatible server, or is not running ({error})") from None


async def _acceptance(client: httpx.AsyncClient) -> Acceptance:
    """From /metrics; nothing if the server has none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return Acceptance()
    return Acceptance.parse(response.text) if response.status_code == 200 else Acceptance()
