"""The users of a load test. Each has a connection, sends a request, reads its stream to the end, and sends the next.

The client must not limit what is measured. So each read of the socket is stored with its time, and parsed only after all
requests are complete; once `KEPT_BYTES` are stored, a stream is parsed when it ends. With several processes (`python -m
fledge.bench.load_client`, started by `fledge.bench.load`) each has a part of the users and of the requests.
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
Arrival = tuple[float, bytes]  # a read of the socket: its time, and its part of the body
# Streams that are stored until the end of a run. Parsing one takes 0.2 ms, during which its user sends nothing.
KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class LoadSettings:
    url: str
    model: str | None = None  # None: the first model that the server lists
    api_key: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    request_rate: float | None = None  # requests per second, Poisson; None: as fast as the concurrency allows
    speculate: bool | None = None  # Fledge's extension of the API; None: not sent
    seed: int = 0
    timeout: float = 600.0
    processes: int = 1  # number of client processes

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", server_url(self.url))
        if "@" in urlsplit(self.url).netloc:
            raise UserError("give the server's key with --api-key, not in the URL")
        authorization(self.api_key)


def server_url(url: str) -> str:
    """The server's URL without a final /v1; UserError if it is not a URL."""
    try:
        place = urlsplit(url)
        is_url = place.scheme in ("http", "https") and bool(place.hostname) and (place.port is None or place.port > 0)
    except ValueError:  # an invalid port
        is_url = False
    if not is_url or not url.isprintable():
        raise UserError(f"{printable(url, 100)!r} is not a URL; give the server's address, such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


def authorization(key: str | None) -> dict[str, str]:
    """The header with the API key; empty without a key."""
    if key and not (key.isascii() and key.isprintable()):
        raise UserError("the API key contains a character that HTTP headers do not allow")
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass
class Sample:
    """The measurements of one request, as the client saw it."""

    seconds: float = 0.0
    first_token_seconds: float | None = None
    gaps: list[float] = field(default_factory=list)  # between arrivals of text
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_arrival_share: float = 0.0  # fraction of the text in the first read; 0: not known, counted as one token
    error: str | None = None

    @property
    def decode_seconds(self) -> float:
        """The time from the first arrival of text to the last; 0 if all text arrived together."""
        return 0.0 if self.first_token_seconds is None else self.seconds - self.first_token_seconds

    @property
    def decode_tokens(self) -> float:
        """Tokens that arrived in that time: all except those of the first read, estimated from its fraction of the text."""
        return self.completion_tokens - max(1.0, self.first_arrival_share * self.completion_tokens)

    @property
    def token_seconds(self) -> float | None:
        """Time per output token after the first; None if the stream shows no time between two tokens."""
        if self.decode_seconds <= 0 or self.decode_tokens <= 0:
            return None
        return self.decode_seconds / self.decode_tokens


class ProtocolError(Exception):
    """The received bytes are not an HTTP/1.1 response."""


class ResponseReader:
    """Parses an HTTP response incrementally: status, headers and the chunks of the body."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self.keeps_open = True
        self._has_length = False
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Parses `data` and returns its part of the body."""
        self._parts = []
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ProtocolError(f"no HTTP response: {str(error)[:80]} in {data[:80]!r}") from None
        return b"".join(self._parts)

    def end(self) -> None:
        """Called when the server has closed the connection; raises if the response is incomplete."""
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
    """A connection that carries one request at a time."""

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
    """A complete answer that is not parsed yet."""

    begin: float
    arrivals: list[Arrival]


class User:
    """Sends one request after the other, over one connection while the server keeps it open."""

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
    """Parses a complete stream. A stream without usage or without [DONE] is an error."""
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
                sample.error = f"an event does not follow the API: {str(error)[:100]} in {value[:80]!r}"
                return sample
        if characters == before:
            continue
        if sample.first_token_seconds is None:
            sample.first_token_seconds, first_characters = now - begin, characters
        else:
            sample.gaps.append(now - last)
        last = now
    sample.seconds = last - begin  # until the last arrival of text: closing the stream is not decoding time
    sample.first_arrival_share = first_characters / characters if characters else 0.0
    if not is_done and rest.replace(b" ", b"").strip() != b"data:[DONE]":
        sample.error = "the stream ended without [DONE]"
    elif not has_usage:
        sample.error = "the stream has no usage, although stream_options asked for it; tokens cannot be counted"
    return sample


def num_characters(chunk: dict[str, Any]) -> int:
    """The number of characters in an event, including reasoning and tool calls."""
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
    """Sends every conversation once. `wait` is called when connections are open and returns when requests may start."""
    chance = random.Random(settings.seed)
    waiting = iter(conversations)
    samples: list[Sample] = []
    kept: list[Stream] = []
    num_done, room = 0, KEPT_BYTES
    users = [User(settings) for _ in range(num_users)]
    with contextlib.suppress(OSError):  # each request reports a failed connection itself
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
    """One of several client processes. It reads its part from standard input, prints "ready", waits for a line, and then runs;
    its outcome is pickled to standard output."""
    settings, conversations, num_users = pickle.load(sys.stdin.buffer)

    def wait() -> None:
        print("ready", flush=True)
        if not sys.stdin.buffer.readline():
            sys.exit(1)  # another process failed, so the run is cancelled

    outcome = run(run_users(settings, conversations, num_users, wait=wait))
    # With PYTHONUNBUFFERED, `sys.stdout.buffer` is unbuffered and writes at most what a pipe takes at once: 64 KiB.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        pickle.dump(outcome, out)


def run(work: Any) -> Any:
    """Runs a coroutine with uvloop if it is installed, which is faster."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


if __name__ == "__main__":
    from fledge.bench import load_client  # pickled classes must have this module's name, not `__main__`

    load_client.main()
