"""How callers are told apart, and limits per caller: extra headers or addresses must not make one caller count as several."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge.errors import UsageError
from fledge.serving import flags
from fledge.serving.errors import ApiError
from fledge.serving.generation import CallOptions
from fledge.serving.mask_thread import MAX_OF_ALL, MAX_OF_CALLER, MaskThread, MaskTimeout
from fledge.serving.request_guard import _client_of
from fledge.serving.server import with_mapped
from fledge.serving.service import Service
from tests.serving.conftest import PATIENT, TINY_FLAGS
from tests.serving.test_api import CHAT, HELLO, TEXT, run
from tests.serving.thread_server import ThreadServer


def callers_of(server: ThreadServer, forwarded: Sequence[str]) -> list[str]:
    """Sends a request with each `X-Forwarded-For` header and returns the callers that the server identified."""
    seen, submit = [], server.service.engine.submit

    async def noted(works: list, options: CallOptions, *more: Any) -> object:
        seen.append(options.caller)
        return await submit(works, options, *more)

    server.service.engine.submit = noted
    with server.client() as client:
        for one in forwarded:
            body = {"prompt": "the cat", "max_tokens": 1}
            assert client.post(TEXT, json=body, headers={"X-Forwarded-For": one}).status_code == 200
    return seen


@pytest.mark.parametrize(
    ("given", "callers"),
    [
        ([], ["127.0.0.1", "127.0.0.1"]),
        (["--trusted-proxies", "127.0.0.1"], ["9.9.9.9", "2001:db8:1:2::/64"]),
        (["--trusted-proxies", "10.0.0.1,10.1.0.0/16"], ["127.0.0.1", "127.0.0.1"]),
    ],
)
def test_x_forwarded_for_is_used_only_from_a_trusted_proxy(tiny_folder: Path, given: list[str], callers: list[str]) -> None:
    with ThreadServer([str(tiny_folder), *TINY_FLAGS, *given]) as server:
        # Proxies append to the header: the first entry was sent by the client itself and must be ignored.
        assert callers_of(server, ["1.2.3.4, 9.9.9.9", "2001:db8:1:2:3:4:5:6"]) == callers


@pytest.mark.parametrize("trusted", ["127.0.0.1", "127.0.0.0/8"])
def test_an_ipv4_proxy_is_recognised_on_a_dual_stack_socket(tiny_folder: Path, trusted: str) -> None:
    """On such a socket its address is ::ffff:127.0.0.1."""
    try:
        server = ThreadServer([str(tiny_folder), *TINY_FLAGS, "--trusted-proxies", trusted], host="::")
    except OSError:
        pytest.skip("the machine has no IPv6")
    with server:
        assert callers_of(server, ["9.9.9.9"]) == ["9.9.9.9"]


def test_trusted_proxies_are_also_listed_as_mapped_addresses() -> None:
    assert with_mapped(["10.0.0.1", "10.1.0.0/16", "2001:db8::1"]) == [
        *("10.0.0.1", "10.1.0.0/16", "2001:db8::1"),
        *("::ffff:10.0.0.1/128", "::ffff:10.1.0.0/112"),
    ]


def test_invalid_trusted_proxies_are_refused() -> None:
    for wrong in ("*", "proxy.example.org", "10.0.0.1,", ""):
        with pytest.raises(UsageError, match="not an address"):
            flags.parse(["--trusted-proxies", wrong])
    for everyone in ("0.0.0.0/0", "10.0.0.1,::/0"):
        with pytest.raises(UsageError, match="every address"):
            flags.parse(["--trusted-proxies", everyone])


def test_ipv6_callers_are_identified_by_their_64_bit_prefix() -> None:
    assert _client_of("2001:db8:1:2::3") == _client_of("2001:db8:1:2:ffff:ffff:ffff:ffff") == "2001:db8:1:2::/64"
    assert _client_of("2001:db8:1:3::3") != _client_of("2001:db8:1:2::3")
    assert _client_of("::ffff:10.0.0.1") == _client_of("10.0.0.1") == "10.0.0.1"
    assert _client_of("fe80::1%eth0") == "fe80::/64"
    assert _client_of("not:an:address") == "not:an:address"


# The first API key reaches the limit per caller; all together reach the limit at which new requests are refused.
SLOW_CALLERS = ["key 0"] * MAX_OF_CALLER + [f"caller {number}" for number in range(MAX_OF_ALL - MAX_OF_CALLER)]


@contextmanager
def timed_out_masks(threads: MaskThread, callers: Sequence[str]) -> Iterator[None]:
    """Keeps one timed-out mask of each caller running until the block is left."""
    is_over = threading.Event()

    def spin() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        is_over.wait()

    try:
        for caller in callers:
            with pytest.raises(MaskTimeout):
                threads.run(spin, 0.01, caller)
        yield
    finally:
        is_over.set()
        deadline = time.monotonic() + 60
        while threads.num_timed_out():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_timed_out_masks_are_limited_per_caller_and_in_total() -> None:
    threads = MaskThread()
    with timed_out_masks(threads, SLOW_CALLERS):
        assert threads.num_timed_out() == MAX_OF_ALL
        refused = threads.refusal("another", is_new=True)
        assert refused is not None
        assert (refused.status, refused.code, refused.headers["Retry-After"]) == (503, "overloaded", "60")
        with pytest.raises(ApiError, match="your earlier grammars") as own:
            threads.run(lambda: "quick", 1.0, "key 0")
        assert own.value.status == 429
        for caller in ("another", SLOW_CALLERS[-1]):
            assert threads.run(lambda: "quick", 1.0, caller) == "quick"
    assert threads.refusal("another", is_new=True) is None
    assert threads.run(lambda: "again", 1.0, "key 0") == "again"
    threads.close()


def test_timed_out_masks_do_not_end_answers_of_others(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        loop, may_go_on = service.engine.host.loop, threading.Event()
        slow, other = ({"Authorization": f"Bearer {name}"} for name in ("slow", "other"))
        body = {"messages": HELLO, "max_tokens": 8, "structured_outputs": {"regex": "[a-f]{3}"}}
        assert (await client.post(CHAT, json=body, headers=slow)).status_code == 200
        step = loop.engine.step
        loop.engine.step = lambda: step() if may_go_on.is_set() else time.sleep(0.01) or []
        asked = [asyncio.create_task(client.post(CHAT, json=body | {"n": 2}, headers=headers)) for headers in (slow, other)]
        async with asyncio.timeout(60):
            while len(loop._tracked) < 4:
                await asyncio.sleep(0.01)
        with timed_out_masks(loop.grammars.compiler.mask_thread, SLOW_CALLERS):
            may_go_on.set()
            told, answer = [await one for one in asked]
            assert answer.status_code == 200, answer.text
            assert (told.status_code, told.json()["error"]["type"]) == (429, "rate_limit_error")
            new = await client.post(CHAT, json=body, headers=other)
            assert (new.status_code, new.headers["Retry-After"]) == (503, "60")
            assert new.json()["error"]["code"] == "overloaded"
        assert (await client.post(CHAT, json=body, headers=slow)).status_code == 200

    run(in_process, test, *PATIENT, "--api-key", "slow", "other")


def test_answers_whose_admission_fails_are_not_counted(in_process) -> None:
    """Without the fix they were counted for ever and filled the server: 328 did in an hour of hostile grammars."""

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        loop = service.engine.host.loop
        body = {"messages": HELLO, "max_tokens": 4, "n": 2, "structured_outputs": {"regex": "[a-f]{3}"}}
        assert (await client.post(CHAT, json=body)).status_code == 200
        with timed_out_masks(loop.grammars.compiler.mask_thread, SLOW_CALLERS):
            for _ in range(8 + 16):  # --max-num-seqs and --max-queue
                assert (await client.post(CHAT, json=body)).status_code == 503
        assert [api_server.num_in_flight for api_server in loop.api_servers] == [0]
        assert (await client.post(CHAT, json=body)).status_code == 200

    run(in_process, test, *PATIENT)
