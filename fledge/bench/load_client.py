"""The users of a load test: each has a connection, sends a request, reads its stream to the end, sends the next.

Lean, so that the client is not what is measured: a read of the socket is stored with its time, and looked into when all
requests are complete, or when its own is once much is stored. With several processes (`python -m fledge.bench.load_client`,
started by `fledge.bench.load`) each has a share of the users and of the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import pickle
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec

from fledge.errors import UserError, printable

Conversation = Sequence[dict[str, str]]
Arrival = tuple[float, bytes]  # a read of the socket: when, and its part of the body
# Streams that are kept until the end of a run. Reading one takes a fifth of a millisecond, in which its user asks nothing.
KEPT_BYTES = 256 << 20


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
    processes: int = 1  # of the client

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", server_url(self.url))
        if "@" in urlsplit(self.url).netloc:
            raise UserError("give the server's key with --api-key, not in the URL")
        authorization(self.api_key)


def server_url(url: str) -> str:
    """Without /v1 at its end; UserError if it is none."""
    try:
        place = urlsplit(url)
        is_url = place.scheme in ("http", "https") and bool(place.hostname) and (place.port is None or place.port > 0)
    except ValueError:  # a port that is none
        is_url = False
    if not is_url or not url.isprintable():
        raise UserError(f"{printable(url, 100)!r} is not a URL; give the server's address, such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries an API key."""
    if key and not (key.isascii() and key.isprintable()):
        raise UserError("the API key holds a character that no HTTP header takes")
    return {"Authorization": f"Bearer {key}"} if key else {}


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


class ProtocolError(Exception):
    """What came is no HTTP/1.1 response."""


class ResponseReader:
    """Takes a response's head off and its chunks apart, as its bytes come."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self.keeps_open = True
        self._has_length = False
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """The part of the body that `data` completes."""
        self._parts = []
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ProtocolError(f"no HTTP response: {str(error)[:80]} in {data[:80]!r}") from None
        return b"".join(self._parts)

    def end(self) -> None:
        """The server has closed the connection."""
        if not self.is_complete and (not self.status or self._has_length):
            raise ProtocolError("the server closed the connection before the end of its answer")
        self.is_complete = True
        self.keeps_open = False

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status, self.keeps_open = self._parser.get_status_code(), self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self.is_complete = True


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reader = ResponseReader()
        self.arrivals: list[Arrival] = []
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self.reader.feed(data)
        except ProtocolError as error:
            return self._end(error)
        if body:
            self.arrivals.append((now, body))
        return self._end() if self.reader.is_complete else None

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        try:
            self.reader.end()
            self._end()
        except ProtocolError as short:
            self._end(error or short)

    def _end(self, error: Exception | None = None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)

    async def ask(self, request: bytes, timeout: float) -> tuple[int, list[Arrival]]:
        assert self.transport is not None
        self.reader, self.arrivals = ResponseReader(), []
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        async with asyncio.timeout(timeout):
            await self.done
        if not self.reader.keeps_open:
            self.close()
        return self.reader.status, self.arrivals

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = None


class Stream(NamedTuple):
    """An answer that was not looked into yet."""

    begin: float
    arrivals: list[Arrival]


class User:
    """Sends one request after the other, over one connection as long as it lasts."""

    def __init__(self, settings: LoadSettings) -> None:
        self.settings = settings
        place = urlsplit(settings.url)
        self.host, self.is_secure = place.hostname or "localhost", place.scheme == "https"
        self.port = place.port or (443 if self.is_secure else 80)
        key = "".join(f"{name}: {value}\r\n" for name, value in authorization(settings.api_key).items())
        self.head = (
            f"POST {place.path}/v1/chat/completions HTTP/1.1\r\nHost: {place.netloc.rpartition('@')[2]}\r\n{key}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()
        self.connection: Connection | None = None

    async def connect(self) -> Connection:
        if self.connection is None or self.connection.transport is None:
            loop = asyncio.get_running_loop()
            _, self.connection = await loop.create_connection(Connection, self.host, self.port, ssl=self.is_secure or None)
        return self.connection

    async def ask(self, conversation: Conversation) -> Sample | Stream:
        request = self._request(conversation)
        begin = time.perf_counter()
        try:
            status, arrivals = await (await self.connect()).ask(request, self.settings.timeout)
        except (OSError, ProtocolError, TimeoutError) as error:
            self.close()
            return Sample(error=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - begin)
        if status != 200:
            text = b"".join(body for _, body in arrivals).decode(errors="replace")
            return Sample(error=f"status {status}: {text[:200]}")
        return Stream(begin, arrivals)

    def _request(self, conversation: Conversation) -> bytes:
        settings = self.settings
        body: dict[str, object] = {
            "model": settings.model,
            "messages": list(conversation),
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.speculate is not None:
            body["speculate"] = settings.speculate
        data = json.dumps(body).encode()
        return b"%b%d\r\n\r\n%b" % (self.head, len(data), data)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def read_stream(begin: float, arrivals: Sequence[Arrival]) -> Sample:
    """What a stream's reads say, once it is complete. One without usage or without its end cannot be counted."""
    sample, last, rest = Sample(), begin, b""
    characters = first_characters = 0
    is_done = has_usage = False
    for now, data in arrivals:
        before = characters
        *lines, rest = (rest + data).split(b"\n")
        for line in map(bytes.strip, lines):
            field, _, value = line.partition(b":")  # with or without a space after the colon
            if field == b"data" and value.strip() == b"[DONE]":
                is_done = True
            if is_done or field != b"data":
                continue
            try:
                chunk = msgspec.json.decode(value)
                if chunk.get("error") is not None:
                    sample.error = str(chunk["error"])[:200]
                    return sample
                if usage := chunk.get("usage"):
                    sample.prompt_tokens = operator.index(usage.get("prompt_tokens", 0))
                    sample.completion_tokens = operator.index(usage.get("completion_tokens", 0))
                    has_usage = True
                characters += num_characters(chunk)
            except (msgspec.DecodeError, TypeError, AttributeError, ValueError, RecursionError) as error:
                sample.error = f"an event that has not the API's shape: {str(error)[:100]} in {value[:80]!r}"
                return sample
        if characters == before:
            continue
        if sample.first_token_seconds is None:
            sample.first_token_seconds, first_characters = now - begin, characters
        else:
            sample.gaps.append(now - last)
        last = now
    sample.seconds = last - begin  # to the last arrival of text: closing the stream is not decoding
    sample.first_arrival_share = first_characters / characters if characters else 0.0
    if not is_done and rest.replace(b" ", b"").strip() != b"data:[DONE]":
        sample.error = "the stream ended without [DONE]"
    elif not has_usage:
        sample.error = "the stream has no usage, by which tokens are counted, though stream_options asked for it"
    return sample


def num_characters(chunk: dict[str, Any]) -> int:
    """How much text an event carries, thoughts and tool calls included."""
    total = 0
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        total += len(delta.get("content") or "") + len(delta.get("reasoning") or delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            total += len(function.get("name") or "") + len(function.get("arguments") or "")
    return total


class Outcome(NamedTuple):
    samples: list[Sample]
    begin: float
    end: float


async def run_users(
    settings: LoadSettings,
    conversations: Sequence[Conversation],
    num_users: int,
    on_done: Callable[[int], None] = lambda _: None,
    wait: Callable[[], None] = lambda: None,
) -> Outcome:
    """Sends every conversation once. `wait` returns when all may begin; by then connections are open."""
    chance = random.Random(settings.seed)
    waiting = iter(conversations)
    samples: list[Sample] = []
    kept: list[Stream] = []
    num_done, room = 0, KEPT_BYTES
    users = [User(settings) for _ in range(num_users)]
    with contextlib.suppress(OSError):  # each request says so itself
        await asyncio.gather(*(user.connect() for user in users))
    wait()
    begin = next_start = time.perf_counter()

    async def work(user: User) -> None:
        nonlocal next_start, num_done, room
        for conversation in waiting:
            if settings.request_rate is not None:
                next_start += chance.expovariate(settings.request_rate)
                await asyncio.sleep(max(0.0, next_start - time.perf_counter()))
            answer = await user.ask(conversation)
            if isinstance(answer, Stream):
                room -= sum(len(data) for _, data in answer.arrivals)
                if room > 0:
                    kept.append(answer)
                else:
                    samples.append(read_stream(*answer))
            else:
                samples.append(answer)
            num_done += 1
            on_done(num_done)

    await asyncio.gather(*map(work, users))
    end = time.perf_counter()
    for user in users:
        user.close()
    return Outcome(samples + [read_stream(*stream) for stream in kept], begin, end)


def main() -> None:
    """A process of several: its part on standard input, a line when it is ready, another to begin, its samples as output."""
    settings, conversations, num_users = pickle.load(sys.stdin.buffer)

    def wait() -> None:
        print("ready", flush=True)
        if not sys.stdin.buffer.readline():
            sys.exit(1)  # another process failed, and there will be no run

    outcome = run(run_users(settings, conversations, num_users, wait=wait))
    # With PYTHONUNBUFFERED `sys.stdout.buffer` is not buffered, and writes no more than a pipe holds: 64 KiB.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        pickle.dump(outcome, out)


def run(work: Any) -> Any:
    """With the faster event loop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


if __name__ == "__main__":
    from fledge.bench import load_client  # what it sends must bear this module's name, not `__main__`

    load_client.main()
