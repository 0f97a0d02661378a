"""`fledge conform`: checks that a server gives the same answers with and without speculation, streamed or whole, alone or
under load.

Every scenario's requests are sent one at a time. Each answer is checked and then compared with the same request sent in four
other ways. A comparison covers text, tool calls, finish_reason, token counts and log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

import fledge
from fledge import progress
from fledge.bench.conform_client import Answer, Broken, Endpoint, Refused
from fledge.bench.conform_scenarios import Body, NotSupported, Probe, Scenario, logprob_fields, scenarios
from fledge.bench.conform_values import Failed, common_length
from fledge.bench.load import Acceptance, read_acceptance
from fledge.bench.provenance import command_line
from fledge.errors import UserError, printable

PASS, FAIL, NOT_SUPPORTED = "pass", "fail", "not supported"
VALID, STREAM, AGAIN, LOAD, LOSSLESS = "valid", "streamed = whole", "again = first", "under load = alone", "with = without"
CHECKS = (VALID, STREAM, AGAIN, LOAD, LOSSLESS)
SPECULATION = "speculation"
# Rounding makes log-probabilities depend on the batch: bfloat16 has 8 bits, and errors of a few hundredths are usual.
LOGPROB_TOLERANCE = 0.05
# If the two best tokens are closer than this, rounding decides between them.
NEAR_TIE = 0.01


@dataclass(frozen=True)
class ConformSettings:
    url: str
    against: str | None = None  # a server without speculation; None: a request parameter switches it off, if there is one
    model: str | None = None  # None: the first model that the server lists
    api_key: str | None = None
    against_api_key: str | None = None
    quick: bool = False
    users: int = 16
    timeout: float = 120.0


@dataclass(frozen=True)
class Difference:
    """The first place where two answers differ."""

    where: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"{self.where}: {self.here} against {self.there}"


@dataclass(frozen=True)
class Row:
    scenario: str
    check: str
    status: str
    reason: str = ""
    difference: Difference | None = None


@dataclass
class ConformReport:
    url: str
    model: str
    version: str
    reference: str  # how answers without speculation were made
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    about: dict[str, str] = field(default_factory=dict)

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def passed(self) -> bool:
        return self.count(FAIL) == 0 and self.count(PASS) > 0

    def to_dict(self) -> dict[str, Any]:
        counts = {status: self.count(status) for status in (PASS, FAIL, NOT_SUPPORTED)}
        return {"passed": self.passed, "counts": counts, **asdict(self)}


def compare(here: Answer, there: Answer) -> Difference | None:
    """The first difference between two answers; None if there is none."""
    if len(here.choices) != len(there.choices):
        return Difference("number of answers", str(len(here.choices)), str(len(there.choices)))
    for index, (one, other) in enumerate(zip(here.choices, there.choices, strict=True)):
        prefix = f"answer {index}, " if len(here.choices) > 1 else ""
        for name, a, b in (("text", one.text, other.text), ("reasoning", one.reasoning, other.reasoning)):
            if a != b:
                at = common_length(a, b)
                return Difference(f"{prefix}{name}, character {at}", repr(a[at : at + 40]), repr(b[at : at + 40]))
        calls, others = ([(call.name, _value(call.arguments)) for call in choice.calls] for choice in (one, other))
        if calls != others:
            return Difference(f"{prefix}tool calls", repr(calls), repr(others))
        if one.finish_reason != other.finish_reason:
            return Difference(f"{prefix}finish_reason", repr(one.finish_reason), repr(other.finish_reason))
        tokens, other_tokens = ([entry.token for entry in choice.logprobs] for choice in (one, other))
        if tokens != other_tokens:
            return Difference(f"{prefix}tokens of logprobs", f"{len(tokens)} tokens", f"{len(other_tokens)}, not the same")
        for at, (entry, found) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            if abs(entry.logprob - found.logprob) > LOGPROB_TOLERANCE:
                where = f"{prefix}log-probability of token {at}"
                return Difference(where, f"{entry.logprob:.4f}", f"{found.logprob:.4f}")
    for name in ("prompt_tokens", "completion_tokens"):
        if here.usage.get(name) != there.usage.get(name):
            return Difference(f"usage, {name}", str(here.usage.get(name)), str(there.usage.get(name)))
    return None


def _value(arguments: str) -> Any:
    """The parsed arguments: a server may use other white space in a stream for the same JSON (vLLM does)."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


class Conformance:
    """One run against one server. `reference`: an endpoint without speculation to compare with, if there is one."""

    def __init__(self, endpoint: Endpoint, reference: Endpoint | None, quick: bool = False, users: int = 16) -> None:
        self.endpoint, self.reference, self.users = endpoint, reference, users
        self.probe = Probe(endpoint, max_tokens=24 if quick else 48, num_prompts=1 if quick else 2)
        self.answered: list[tuple[Scenario, Body, Answer]] = []
        self.rows: list[Row] = []

    async def run(self, on_progress: progress.Report = progress.silent) -> list[Row]:
        counted = await read_acceptance(self.endpoint.client)
        counted_reference = await read_acceptance(self.reference.client) if self.reference else None
        wanted = scenarios()
        for number, scenario in enumerate(wanted):
            on_progress(scenario.name, number, len(wanted) + 1)
            self.rows += await self.run_scenario(scenario)
        on_progress("all scenarios again, under load", len(wanted), len(wanted) + 1)
        self.rows += await self.under_load()
        self.rows.append(await self.speculation(counted, counted_reference))
        order = {name: number for number, name in enumerate([SPECULATION, *(one.name for one in scenarios())])}
        self.rows.sort(key=lambda row: (order[row.scenario], CHECKS.index(row.check) if row.check in CHECKS else -1))
        return self.rows

    async def run_scenario(self, scenario: Scenario) -> list[Row]:
        """Runs all checks except the one under load, which needs the answers of all scenarios."""
        try:
            bodies = await scenario.requests(self.probe)
            answers = [await self.endpoint.ask(body) for body in bodies]
        except (Refused, NotSupported) as error:
            return [Row(scenario.name, VALID, NOT_SUPPORTED, str(error))]
        except Broken as error:
            return [Row(scenario.name, VALID, FAIL, str(error))]
        self.answered += [(scenario, body, answer) for body, answer in zip(bodies, answers, strict=True)]
        rows = [await self.valid(scenario, bodies, answers)]
        ways: list[tuple[str, Endpoint, bool]] = [(STREAM, self.endpoint, True), (AGAIN, self.endpoint, False)]
        if self.reference is not None:
            ways.append((LOSSLESS, self.reference, False))
        for check, endpoint, stream in ways:
            asked = [self.compared(check, endpoint, body, answer, stream) for body, answer in zip(bodies, answers, strict=True)]
            rows.append(await self.first_failure(scenario, check, asked))
        return rows

    async def valid(self, scenario: Scenario, bodies: Sequence[Body], answers: Sequence[Answer]) -> Row:
        try:
            for body, answer in zip(bodies, answers, strict=True):
                await scenario.check(self.probe, body, answer)
        except (Failed, Broken, Refused) as error:
            return Row(scenario.name, VALID, FAIL, str(error))
        return Row(scenario.name, VALID, PASS, _requests(bodies))

    async def compared(
        self, check: str, endpoint: Endpoint, body: Body, answer: Answer, stream: bool
    ) -> tuple[str, Difference | None]:
        """Sends the request again; returns what is wrong (or "") and the first difference from `answer`."""
        other = await endpoint.ask(body, stream)
        difference = compare(answer, other) if check == LOSSLESS else compare(other, answer)
        reasons = list(dict.fromkeys(other.problems))
        if difference is not None:
            reasons.append(await self.explain(endpoint, body, answer, other, difference))
        return "; ".join(reasons), difference

    async def first_failure(
        self, scenario: Scenario, check: str, asked: Sequence[Awaitable[tuple[str, Difference | None]]]
    ) -> Row:
        outcome: Row | None = None
        for one in asked:
            try:
                reason, difference = await one
            except Refused as error:
                outcome = outcome or Row(scenario.name, check, NOT_SUPPORTED, str(error))
                continue
            except Broken as error:
                reason, difference = str(error), None
            if reason and (outcome is None or outcome.status != FAIL):
                outcome = Row(scenario.name, check, FAIL, reason, difference)
        return outcome or Row(scenario.name, check, PASS, _requests(asked))

    async def under_load(self) -> list[Row]:
        """Sends all requests again, at least `users` of them, `users` at a time, every other one streamed."""
        if not self.answered:
            return []
        rounds = -(-self.users // len(self.answered))
        gate = asyncio.Semaphore(self.users)

        async def ask(number: int, body: Body, answer: Answer) -> tuple[str, Difference | None]:
            async with gate:
                return await self.compared(LOAD, self.endpoint, body, answer, stream=number % 2 == 1)

        queue = [one for _ in range(rounds) for one in self.answered]
        tasks = [asyncio.create_task(ask(number, body, answer)) for number, (_, body, answer) in enumerate(queue)]
        await asyncio.gather(*tasks, return_exceptions=True)
        rows = []
        for scenario in dict.fromkeys(scenario for scenario, _, _ in self.answered):
            mine = [task for task, (owner, _, _) in zip(tasks, queue, strict=True) if owner is scenario]
            rows.append(await self.first_failure(scenario, LOAD, mine))
        return rows

    async def explain(self, endpoint: Endpoint, body: Body, answer: Answer, other: Answer, difference: Difference) -> str:
        """Describes a difference; for greedy text, log-probabilities show whether it was a near tie."""
        said = "text" in difference.where
        if body.get("temperature") != 0 and (said or "tool calls" in difference.where):
            only = "; a server that guarantees only the distribution may draw other random numbers"
            return f"another text for the same seed{only if endpoint is self.reference else ''}"
        if not said:
            return f"the answers differ in {difference.where}"
        if len(answer.choices) > 1:
            return "another greedy text"
        try:
            entries = (await endpoint.ask(body | logprob_fields(body))).first.logprobs
        except (Refused, Broken):
            return "another greedy text"
        left = common_length(answer.first.text, other.first.text)
        for entry in entries:
            left -= len(entry.token)
            best = sorted(entry.top.values(), reverse=True)[:2]
            if left < 0 and len(best) == 2:
                gap = best[0] - best[1]
                tie = "a near tie that rounding decides" if gap < NEAR_TIE else "not a tie"
                return f"another greedy text; the two best tokens there are {gap:.4f} apart in log-probability: {tie}"
        return "another greedy text"

    async def speculation(self, before: Acceptance | None, reference_before: Acceptance | None) -> Row:
        """Checks that anything was drafted: otherwise the other rows do not test speculation."""
        after = await read_acceptance(self.endpoint.client)
        if before is None or after is None:
            return Row(SPECULATION, "at work", NOT_SUPPORTED, "the server's /metrics do not count drafts")
        seen = after.since(before)
        if not seen.drafts:
            return Row(SPECULATION, "at work", NOT_SUPPORTED, "no draft was made: these rows do not test speculation")
        reason = f"{seen.drafts:.0f} drafts, acceptance length {seen.length:.2f}"
        if self.reference is not None and self.reference.client is not self.endpoint.client:
            reference_after = await read_acceptance(self.reference.client)
            drafts = reference_after.since(reference_before).drafts if reference_before and reference_after else 0
            if drafts:
                reason = f"the server to compare with speculates too ({drafts:.0f} drafts)"
                return Row(SPECULATION, "at work", FAIL, reason)
        return Row(SPECULATION, "at work", PASS, reason)


async def find_switch(endpoint: Endpoint) -> Endpoint | None:
    """An endpoint that switches speculation off per request (Fledge's `speculate`); None if the server cannot do that."""
    off = endpoint.with_extra(speculate=False)
    for body in ({"messages": [{"role": "user", "content": "Count to ten."}]}, {"prompt": "one two three four"}):
        asked = body | {"max_tokens": 16, "temperature": 0, "include_speculation": True}
        try:
            on, without = [(await one.ask(asked)).usage.get("speculation") for one in (endpoint, off)]
        except (Refused, Broken):
            continue
        if isinstance(on, dict) and isinstance(without, dict) and not without.get("steps"):
            return off
    return None


async def run_conformance(settings: ConformSettings, on_progress: progress.Report = progress.silent) -> ConformReport:
    begin = time.perf_counter()
    endpoint = Endpoint.open(settings.url, settings.model, settings.api_key, settings.timeout)
    other = Endpoint.open(settings.against, None, settings.against_api_key, settings.timeout) if settings.against else None
    reference: Endpoint | None
    try:
        await endpoint.connect()
        if other is not None:
            await other.connect()
            reference, words = other, f"{other.url}{f' ({other.version})' if other.version else ''}"
        else:
            reference = await find_switch(endpoint)
            words = 'the same server with "speculate": false in the request'
        if reference is None:
            words = "not available: no per-request switch was found and no --against was given, so only the server's "
            words += "agreement with itself was checked"
        conformance = Conformance(endpoint, reference, settings.quick, settings.users)
        rows = await conformance.run(on_progress)
        if not conformance.answered:
            reason = next((row.reason for row in rows if row.scenario != SPECULATION), "")
            raise UserError(f"{endpoint.url}: no request was answered; the first reason: {printable(reason, 300)}")
    finally:
        for one in filter(None, (endpoint, other)):
            await one.client.aclose()
    about = {"fledge": fledge.__version__, "httpx": httpx.__version__, "command": command_line()}
    about["time"] = datetime.now(UTC).isoformat(timespec="seconds")
    sizes = {"max_tokens": conformance.probe.max_tokens, "prompts": conformance.probe.num_prompts, "users": settings.users}
    seconds = time.perf_counter() - begin
    return ConformReport(endpoint.url, str(endpoint.model), endpoint.version, words, sizes, rows, seconds, about)


def _requests(things: Sequence[object]) -> str:
    return f"{len(things)} request{'s' if len(things) != 1 else ''}"
