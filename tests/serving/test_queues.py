"""The queues of grammars to compile and texts to tokenise: bounded, fair to callers, and cleared when a client disconnects."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge.serving import prompts
from fledge.serving.fair_queue import FairQueue
from fledge.serving.protocol import ChatRequest
from fledge.serving.service import SHORT_TEXT, Service
from tests.serving.conftest import PATIENT, TINY_FLAGS
from tests.serving.test_api import CHAT, HELLO, ask, run
from tests.serving.test_engine_process import wait_for
from tests.serving.thread_server import ThreadServer

KEYS = ["--api-key", "greedy", "modest"]
GREEDY, MODEST = ({"Authorization": f"Bearer {name}"} for name in ("greedy", "modest"))


def structured(**grammar: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4, "structured_outputs": grammar}


@contextmanager
def slow_grammars(service: Service) -> Iterator[Any]:
    """Holds back all grammar compilation until the block is left."""
    grammars, may_go_on = service.engine.host.loop.grammars, threading.Event()
    compile_now = grammars._compile

    def compile_later(*given: Any) -> None:
        may_go_on.wait(60)
        compile_now(*given)

    grammars._compile = compile_later
    try:
        yield grammars
    finally:
        may_go_on.set()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_grammar_queue_is_bounded_and_fair(in_process) -> None:
    """At most as many wait as answers may. When one caller has filled the queue, another still gets a place."""

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        room = 8 + 16  # --max-num-seqs and --max-queue
        with slow_grammars(service) as grammars:
            asked = [
                asyncio.create_task(client.post(CHAT, json=structured(choice=[f"a{n}"]), headers=GREEDY))
                for n in range(room + 10)
            ]
            await until(lambda: sum(one.done() for one in asked) == 8)  # 34 asked, 24 wait, two are being compiled
            refused = [one.result() for one in asked if one.done()]
            assert {one.status_code for one in refused} == {503}
            assert all(int(one.headers["Retry-After"]) > 0 for one in refused)
            assert len(grammars._waiting) == room
            modest = asyncio.create_task(client.post(CHAT, json=structured(choice=["b"]), headers=MODEST))
            await until(lambda: len(grammars._compiling) == 3)
        assert (await modest).status_code == 200
        # Once compiled they need places as answers, and there are not enough for all at once.
        assert {(await one).status_code for one in asked} <= {200, 503}

    run(in_process, test, *PATIENT, *KEYS, "--max-queue", "16")


def test_a_grammar_that_is_too_long_is_not_queued(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        service.engine.host.loop.grammars.start = None  # must not be called
        for grammar in (
            {"regex": "a" * 70_000},
            {"choice": ["a" * 1000] * 70},
            {"choice": [""] * 20_000},  # quotes and separators are counted, too
            {"json": {"title": "a" * 70_000}},
        ):
            told = await ask(client, status=400, **structured(**grammar))
            assert "characters; at most 65536 are taken (--max-grammar-characters)" in told["error"]["message"]

    run(in_process, test)


def test_compiling_a_grammar_counts_towards_the_request_timeout(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        with slow_grammars(service) as grammars:
            told = await ask(client, status=504, **structured(choice=["a"]))
            assert told["error"]["code"] == "timeout"
            await until(lambda: grammars._forgotten)  # marked to be dropped

    run(in_process, test, "--request-timeout", "0.3")


def test_tokenising_a_text_counts_towards_the_request_timeout(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        with slow_tokenizer(service) as thread:
            long = [{"role": "user", "content": "a" * 40_000}]
            # One is being tokenised, one waits.
            for told in await asyncio.gather(*(ask(client, status=504, messages=long) for _ in range(2))):
                assert told["error"]["code"] == "timeout"
            assert not thread._waiting

    run(in_process, test, "--request-timeout", "0.3")


def test_time_spent_on_a_grammar_is_deducted_from_the_answers_timeout(in_process) -> None:

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        engine, left = service.engine, []
        submit = engine.submit

        async def noted(works: Any, options: Any, deadline: float) -> Any:
            left.append(deadline - engine.event_loop.time())
            return await submit(works, options, deadline)

        engine.submit = noted
        with slow_grammars(service) as grammars:
            asked = asyncio.create_task(ask(client, **structured(choice=["a"])))
            await until(lambda: grammars._compiling)
            await asyncio.sleep(0.3)
        await asked
        assert 0 < left[0] < 600 - 0.3

    run(in_process, test, *PATIENT, "--request-timeout", "600")


def test_waiting_grammars_are_dropped_when_clients_disconnect(tiny_folder: Path) -> None:
    with ThreadServer([str(tiny_folder), *TINY_FLAGS, *PATIENT]) as server, slow_grammars(server.service) as grammars:
        callers = [server.post(CHAT, structured(choice=[f"a{number}"])) for number in range(6)]
        wait_for(lambda: len(grammars._waiting) == 4)
        for one in callers:
            one.close()
        wait_for(lambda: not grammars._waiting and len(grammars._forgotten) == 2)
        assert not server.service.engine._waiting
        assert not server.log.tracebacks


@contextmanager
def slow_tokenizer(service: Service) -> Iterator[Any]:
    """Holds back the tokenising of long texts until the block is left."""
    may_go_on = threading.Event()
    service._tokenizing_long._thread.submit(may_go_on.wait, 60)
    try:
        yield service._tokenizing_long
    finally:
        may_go_on.set()


def test_the_tokenizer_queue_is_bounded_and_fair(in_process) -> None:
    """The limit is a million characters. Another caller still gets a place, before most of the first one's texts."""

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        order: list[str] = []

        async def figures(client: httpx.AsyncClient) -> str:
            return (await client.get("/metrics", headers=GREEDY)).text

        async def tokenize(headers: dict[str, str], length: int) -> int:
            response = await client.post("/tokenize", json={"prompt": "a" * length}, headers=headers)
            order.append(headers["Authorization"])
            if response.status_code == 503:
                assert int(response.headers["Retry-After"]) > 0
            return response.status_code

        with slow_tokenizer(service) as thread:
            greedy = [asyncio.create_task(tokenize(GREEDY, 200_000)) for _ in range(20)]
            await until(lambda: sum(one.done() for one in greedy) == 14)  # one is being tokenised, five wait
            assert {one.result() for one in greedy if one.done()} == {503}
            async with asyncio.timeout(60):  # the HTTP process reports once a second
                while 'requests_rejected_total{engine="0",model_name="tiny"} 14.0' not in await figures(client):
                    await asyncio.sleep(0.1)
            modest = asyncio.create_task(tokenize(MODEST, 100_000))
            await until(lambda: len(thread._waiting) == 6)
            order.clear()
        assert await modest == 200
        assert {await one for one in greedy} == {200, 503}
        assert order.index(MODEST["Authorization"]) <= 2
        body = {"tokens": [5, 6]}
        assert (await client.post("/detokenize", json=body, headers=GREEDY)).status_code == 200

    run(in_process, test, *KEYS, "--max-tokenizer-queue", "1000000")


def test_waiting_texts_are_not_tokenised_after_cancellation(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        done = []
        with slow_tokenizer(service) as thread:
            works = [asyncio.create_task(thread.run(lambda n=n: done.append(n), 1000, f"caller {n}")) for n in range(6)]
            await until(lambda: len(thread._waiting) == 5)
            for one in works[:4]:
                one.cancel()
            await until(lambda: len(thread._waiting) == 1)
        await asyncio.gather(*works[4:])
        assert done == [4, 5]

    run(in_process, test)


LONG = "x" * 3000
FIELDS: dict[str, dict[str, Any]] = {
    "content": {"messages": [{"role": "user", "content": LONG}]},
    "reasoning": {"messages": [{"role": "assistant", "content": "a", "reasoning": LONG}]},
    "reasoning_content": {"messages": [{"role": "assistant", "content": "a", "reasoning_content": LONG}]},
    "tool_call_id": {"messages": [{"role": "tool", "content": "a", "tool_call_id": LONG}]},
    "arguments": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": LONG}}]}]},
    "kwargs": {"messages": HELLO, "chat_template_kwargs": {"documents_of_mine": [{"text": LONG}]}},
    "keys of kwargs": {"messages": HELLO, "chat_template_kwargs": {LONG: 1}},
    "tools": {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
    "parameters": {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": {LONG: {}}}}]},
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_that_a_template_reads_counts_towards_the_length(name: str) -> None:
    given = ChatRequest.model_validate(FIELDS[name])
    assert prompts.length(given.messages, given.tools, given.chat_template_kwargs) > max(SHORT_TEXT, len(LONG))


def test_a_skipped_caller_keeps_the_order_of_its_items() -> None:
    """A caller at its limit of compiling grammars is skipped; its later grammars must not overtake its earlier ones."""
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1", "a3"):
        queue.push(item[0], item)
    assert queue.pop_for(lambda caller: caller != "a") == "b1"
    assert queue.pop_for(lambda caller: caller != "a") is None
    assert [queue.pop() for _ in range(len(queue))] == ["a1", "a2", "a3"]


def test_a_failure_is_logged_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadServer([str(tiny_folder), *TINY_FLAGS]) as server, server.client() as client:
        monkeypatch.setattr(server.service, "check_model", lambda _: 1 / 0)
        response = client.post(CHAT, json={"messages": HELLO})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        deadline = time.monotonic() + 10
        while not server.log.tracebacks and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        # uvicorn's record reaches the handlers of two loggers.
        assert len({one for one in server.log.tracebacks if "ZeroDivisionError" in one}) == 1, server.log.tracebacks
