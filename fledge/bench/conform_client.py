"""The client of `fledge conform`: reads whole or streamed answers of any OpenAI-compatible server into one form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from fledge.bench.load_client import authorization, server_url
from fledge.errors import UserError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Statuses by which a server refuses a request. 408 and 429 mean "try again later", which is a failure here.
REFUSALS = frozenset(range(400, 500)) - {401, 403, 408, 429} | {501}

MAX_INDEX = 256  # largest index of choices and tool calls: a wrong one must not exhaust memory


class Refused(Exception):
    """The server refuses the request; the message is the server's."""


class Broken(Exception):
    """There is no usable answer: a server error, a closed connection, or a response that does not follow the API."""


@dataclass(frozen=True)
class TokenLogprob:
    token: str
    logprob: float
    top: dict[str, float]


@dataclass
class ToolCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Choice:
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, data: dict[str, Any]) -> None:
        """Adds the choice of a whole answer or of one event."""
        message = data.get("message") or data.get("delta") or {}
        self.text += _text(message.get("content") or data.get("text") or "")
        self.reasoning += _text(message.get("reasoning") or message.get("reasoning_content") or "")
        for position, given in enumerate(message.get("tool_calls") or ()):
            index = _bounded(given.get("index", position))
            self.calls += [ToolCall() for _ in range(index + 1 - len(self.calls))]
            call, function = self.calls[index], given.get("function") or {}
            call.id = call.id or _text(given.get("id") or "")
            call.name += _text(function.get("name") or "")
            call.arguments += _text(function.get("arguments") or "")
        self.logprobs += _logprobs(data.get("logprobs"))
        self.finish_reason = _text(data.get("finish_reason") or self.finish_reason or "") or None


@dataclass
class Answer:
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # violations of the streaming protocol

    @property
    def first(self) -> Choice:
        return self.choices[0]

    def choice(self, index: int) -> Choice:
        index = _bounded(index)
        self.choices += [Choice() for _ in range(index + 1 - len(self.choices))]
        return self.choices[index]


class Endpoint:
    """A server with parameters that every request gets (`extra`)."""

    def __init__(
        self, client: httpx.AsyncClient, model: str | None = None, extra: dict[str, Any] | None = None, version: str = ""
    ) -> None:
        self.client, self.model, self.extra, self.version = client, model, extra or {}, version

    @property
    def url(self) -> str:
        """The URL without user name and password, for display."""
        return str(self.client.base_url.copy_with(username=None, password=None)).rstrip("/")

    @classmethod
    def open(cls, url: str, model: str | None = None, api_key: str | None = None, timeout: float = 120.0) -> Endpoint:
        base, headers, limits = server_url(url), authorization(api_key), httpx.Limits(max_connections=None)
        return cls(httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout), model)

    def with_extra(self, **extra: Any) -> Endpoint:
        return Endpoint(self.client, self.model, self.extra | extra, self.version)

    async def connect(self) -> None:
        """Finds the model's name and the server's version; raises UserError if the server cannot be used."""
        try:
            response = await self.client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(f"{self.url}: no server answers there ({str(error) or type(error).__name__})") from None
        if response.status_code in (401, 403):
            raise UserError(f"{self.url} answers {response.status_code}; give its key with --api-key")
        try:
            names = [str(one["id"]) for one in response.raise_for_status().json()["data"]]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.url} is not an OpenAI-compatible server: /v1/models answers {response.status_code} without a list of "
                "models"
            ) from None
        if not names:
            raise UserError(f"{self.url} serves no model: its /v1/models is empty")
        self.model = self.model if self.model is not None else names[0]
        self.version = await self._version()

    async def _version(self) -> str:
        try:
            response = await self.client.get("/version")
            return str(response.json()["version"]) if response.status_code == 200 else ""
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""

    async def token_ids(self, text: str) -> list[int]:
        """The token ids of a text, from /tokenize, which vLLM and Fledge have."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        data = await self._post("/tokenize", body)
        try:
            return [int(one) for one in data["tokens"]]
        except (KeyError, TypeError, ValueError):
            raise Broken("/tokenize answers without token ids") from None

    async def ask(self, body: dict[str, Any], stream: bool = False) -> Answer:
        path = CHAT if "messages" in body else COMPLETIONS
        body = {"model": self.model, **body, **self.extra}
        if not stream:
            return _whole(await self._post(path, body))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self.client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise _error(response.status_code, (await response.aread()).decode(errors="replace"))
                lines = [line async for line in response.aiter_lines()]
        except httpx.HTTPError as error:
            raise Broken(f"the stream broke off ({type(error).__name__}: {error})") from None
        return _streamed(lines)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = await self.client.post(path, json=body)
        except httpx.HTTPError as error:
            raise Broken(f"no answer ({type(error).__name__}: {error})") from None
        if response.status_code != 200:
            raise _error(response.status_code, response.text)
        try:
            return response.json()
        except ValueError:
            raise Broken(f"the answer is not JSON: {response.text[:80]!r}") from None


def _error(status: int, text: str) -> Refused | Broken:
    try:
        error = json.loads(text)
        error = error.get("error", error)
        message = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        message = text
    message = f"status {status}: {' '.join(message.split())[:240]}"
    return Refused(message) if status in REFUSALS else Broken(message)


def _whole(data: Any) -> Answer:
    answer = Answer()
    try:
        for position, choice in enumerate(data["choices"]):
            answer.choice(choice.get("index", position)).add(choice)
        answer.usage = _usage(data.get("usage"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Broken(f"the answer does not follow the API ({type(error).__name__}: {error})") from None
    if not answer.choices:
        raise Broken("the answer has no choices")
    return answer


def _streamed(lines: list[str]) -> Answer:
    answer, done, usage_at, last = Answer(), False, None, -1
    for last, data in enumerate(_events(lines)):
        if data == "[DONE]":
            done = True
            break
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise Broken(f"an error within the stream: {str(chunk['error'])[:200]}")
            for position, given in enumerate(chunk.get("choices") or ()):
                choice = answer.choice(given.get("index", position))
                ended, before = choice.finish_reason is not None, (choice.text, str(choice.calls))
                choice.add(given)
                if ended and before != (choice.text, str(choice.calls)):
                    answer.problems.append("text comes after the finish_reason")
            if chunk.get("usage"):
                answer.usage, usage_at = _usage(chunk["usage"]), last
        except (ValueError, TypeError, AttributeError, IndexError, KeyError, RecursionError) as error:
            raise Broken(f"an event does not follow the API ({type(error).__name__}: {data[:80]!r})") from None
    if not answer.choices:
        raise Broken("the stream has no choices")
    if not done:
        answer.problems.append("the stream does not end with [DONE]")
    if usage_at is None:
        answer.problems.append("no usage on the last chunk, though stream_options asked for it")
    elif usage_at != last - done:
        answer.problems.append("usage is not on the last chunk")
    if any(choice.finish_reason is None for choice in answer.choices):
        answer.problems.append("a choice has no finish_reason")
    if any(not call.name or not call.id for choice in answer.choices for call in choice.calls):
        answer.problems.append("a streamed tool call has no name or no id")
    return answer


def _usage(given: Any) -> dict[str, Any]:
    """The usage, whose counts must be numbers; other entries are kept unchanged."""
    usage = dict(given or {})
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        if not isinstance(usage.get(name, 0), int | None):
            raise TypeError(f"usage: {name} is {usage[name]!r:.40}")
    return usage


def _bounded(index: Any) -> int:
    if not isinstance(index, int) or not 0 <= index < MAX_INDEX:
        raise ValueError(f"index {index}")
    return index


def _events(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("data:"):
            yield line[5:].strip()


def _logprobs(given: Any) -> list[TokenLogprob]:
    """The logprobs, in chat's form (`content`) or that of completions (parallel lists)."""
    if not given:
        return []
    if "content" in given:
        return [
            _logprob(one["token"], one["logprob"], {top["token"]: top["logprob"] for top in one.get("top_logprobs") or ()})
            for one in given["content"] or ()
        ]
    tops = given.get("top_logprobs") or [None] * len(given["tokens"])
    together = zip(given["tokens"], given["token_logprobs"], tops, strict=True)
    return [_logprob(token, logprob, top or {}) for token, logprob, top in together]


def _logprob(token: Any, logprob: Any, top: Any) -> TokenLogprob:
    return TokenLogprob(_text(token), _log(logprob), {_text(other): _log(value) for other, value in top.items()})


def _log(value: Any) -> float:
    """The log-probability, checked; rounding may make it slightly larger than 0."""
    if not isinstance(value, int | float) or not -math.inf < value < 1:
        raise ValueError(f"a log-probability is {value!r:.40}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, not {value!r:.40}")
    return value
