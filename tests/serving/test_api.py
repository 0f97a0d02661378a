"""The HTTP routes, with the app in this process: answers, streams, errors, limits."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge.serving import engine_loop, flags
from fledge.serving.app import create_app
from fledge.serving.build import build
from fledge.serving.engine_loop import MAX_FAILURES
from fledge.serving.service import Service
from tests.serving.conftest import TINY_FLAGS
from tests.serving.processes import wait_until_ready

HELLO = [{"role": "user", "content": "the cat sat"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def run(start: Callable, test: Callable[[httpx.AsyncClient, Service], Awaitable[Any]], *extra: str) -> Any:
    async def main() -> Any:
        async with start(*extra) as (client, service):
            result = await test(client, service)
            await check_all_free(service)
            return result

    return asyncio.run(main())


async def check_all_free(service: Service) -> None:
    """Waits for running requests, then checks that no request and no KV page is left allocated."""
    api_server, engine, deadline = service.engine, service.engine.host.loop.engine, time.monotonic() + 30
    while (api_server.num_in_flight or (engine.requests and api_server.state == "ready")) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages
    assert service.engine.num_in_flight == 0


async def ask(client: httpx.AsyncClient, path: str = CHAT, status: int = 200, **body: Any) -> dict[str, Any]:
    if path == CHAT:
        body.setdefault("messages", HELLO)
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    if path == CHAT:
        body.setdefault("messages", HELLO)
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_stream_equals_the_whole_answer(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        body = {"temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 2, "include_speculation": True}
        whole = await ask(client, **body)
        chunks = await stream(client, stream_options={"include_usage": True}, **body)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"] != ""
        spans = [span for choice in choices for span in choice.get("speculation", {}).get("spans", ())]
        assert "".join(piece for piece, _ in spans) == text
        logprobs = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
        assert logprobs == whole["choices"][0]["logprobs"]["content"]
        assert len(logprobs) == 24
        assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24
        assert all(chunk["usage"] is None for chunk in chunks[:-1])

    run(in_process, test)


def test_completions_take_texts_and_token_ids(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        ids = (await ask(client, "/tokenize", prompt="the cat"))["tokens"]
        body = {"temperature": 0, "max_tokens": 8, "logprobs": 1}
        by_text, by_ids = await ask(client, TEXT, prompt="the cat", **body), await ask(client, TEXT, prompt=ids, **body)
        assert by_text["choices"] == by_ids["choices"]
        several = await ask(client, TEXT, prompt=["the cat", "the dog"], n=2, **body)
        assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
        assert several["choices"][0]["text"] == several["choices"][1]["text"] == by_text["choices"][0]["text"]
        assert several["usage"]["completion_tokens"] == 32
        chunks = await stream(client, TEXT, prompt="the cat", echo=False, **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == by_text["choices"][0]["text"]
        offsets = by_text["choices"][0]["logprobs"]["text_offset"]
        assert offsets == [at for chunk in chunks for at in (chunk["choices"][0]["logprobs"] or {}).get("text_offset", ())]
        echoed = await ask(client, TEXT, prompt="the cat", echo=True, temperature=0, max_tokens=8)
        assert echoed["choices"][0]["text"] == "the cat" + by_text["choices"][0]["text"]

    run(in_process, test)


def test_sampling_parameters_take_effect(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        def text(answer: dict) -> str:
            return answer["choices"][0]["message"]["content"]

        seeded = {"temperature": 1.5, "max_tokens": 12}
        assert text(await ask(client, seed=7, **seeded)) == text(await ask(client, seed=7, **seeded))
        assert text(await ask(client, seed=7, **seeded)) != text(await ask(client, seed=8, **seeded))
        several = await ask(client, seed=7, n=3, **seeded)
        assert len({choice["message"]["content"] for choice in several["choices"]}) == 3
        await ask(client, temperature=5e-324, max_tokens=4)  # too small to divide by
        greedy = {"temperature": 0, "max_completion_tokens": 12}
        plain = await ask(client, logprobs=True, **greedy)
        sharp = await ask(client, temperature=1.0, min_p=1.0, max_tokens=12, seed=1)
        assert text(sharp) == text(plain)  # only the most likely token is left
        token = (await ask(client, "/tokenize", prompt="cat"))["tokens"][-1]
        piece = (await ask(client, "/detokenize", tokens=[token]))["prompt"]
        pushed = {"logit_bias": {str(token): 30}, "temperature": 0, "max_tokens": 40}
        assert text(await ask(client, **pushed)) == piece * 40
        assert text(await ask(client, presence_penalty=2.0, **pushed)) == piece * 40
        worn_out = text(await ask(client, frequency_penalty=2.0, **pushed))
        assert worn_out.startswith(piece * 5)
        assert worn_out != piece * 40

    run(in_process, test)


def test_stop_strings_are_cut_and_never_streamed(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        free = await ask(client, temperature=0, max_tokens=24)
        text = free["choices"][0]["message"]["content"]
        stop = text[6:9]
        cut = await ask(client, temperature=0, max_tokens=24, stop=[stop, "never comes"])
        choice = cut["choices"][0]
        assert choice["message"]["content"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        chunks = await stream(client, temperature=0, max_tokens=24, stop=stop, include_speculation=True)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text[: text.index(stop)]
        spans = [span for choice in choices for span in choice.get("speculation", {}).get("spans", ())]
        assert "".join(piece for piece, _ in spans) == text[: text.index(stop)]
        kept = await ask(client, temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=True)
        assert kept["choices"][0]["message"]["content"].endswith(stop)

    run(in_process, test)


MISTAKES = [
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": HELLO, "repetition_penalty": 5e-324}, 400, "repetition_penalty"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n"),
    (CHAT, {"messages": HELLO, "n": 200}, 400, "n"),
    (CHAT, {"messages": HELLO, "model": "gpt-5"}, 404, "gpt-5"),
    (CHAT, {"messages": HELLO, "max_tokens": 100_000}, 400, "context"),
    (CHAT, {"messages": [{"role": "user", "content": "cat " * 2000}]}, 400, "context"),
    (CHAT, {"messages": HELLO, "logit_bias": {"cat": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "99999"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, 400, "logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 50}, 400, "20"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ x }}"}, 400, "--chat-template"),
    (CHAT, {"messages": HELLO, "continue_final_message": True}, 400, "assistant"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "tokenize"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "--enable-auto-tool-choice"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tools"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400, "stream"),
    (CHAT, {"messages": HELLO, "use_beam_search": True}, 400, "use_beam_search"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "json_schema"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"json": {"items": {"uniqueItems": True}}}}, 400, "#/items/uniqueItems"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"json": '{"not": {}}'}}, 400, "#/not"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    (CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 4}, 400, "min_tokens"),
    (CHAT, {"messages": HELLO, "allowed_token_ids": [5]}, 400, "allowed_token_ids"),
    (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, 400, "use tools"),
    (CHAT, {"messages": HELLO, "function_call": {"name": "f"}}, 400, "use tools"),
    (CHAT, {"messages": HELLO, "return_token_ids": True}, 400, "return_token_ids"),
    (CHAT, {"messages": HELLO, "cache_salt": "x"}, 400, "cache_salt"),
    (CHAT, {"messages": HELLO, "guided_json": {"uniqueItems": True}}, 400, "#/uniqueItems"),
    (CHAT, {"messages": HELLO, "guided_regex": "a", "structured_outputs": {"regex": "b"}}, 400, "exclude"),
    (CHAT, {"messages": HELLO, "bad_words": ["x"] * 65}, 400, "--max-bad-words"),
    (CHAT, {"messages": HELLO, "bad_words": ["x" * 8193]}, 400, "--max-stop-characters"),
    (CHAT, {"messages": HELLO, "bad_words": [" "]}, 400, "bad_words"),
    (CHAT, {"messages": HELLO, "logit_bias": {"1_0": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"٣٥": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, 400, "101"),
    (TEXT, {"prompt": ""}, 400, "empty"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [99999]}, 400, "99999"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 1}, 400, "echo"),
    (TEXT, {"prompt": "a", "best_of": 3}, 400, "best_of"),
    ("/v1/responses", {"input": []}, 400, "input"),
    ("/v1/responses", {"input": "a", "previous_response_id": "r"}, 400, "messages"),
    ("/v1/responses", {"input": "a", "tools": [{}]}, 400, "tools"),
    ("/v1/responses", {"input": "a", "tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/responses", {"input": "a", "top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}, 400, "include"),
    ("/v1/responses", {"input": "a", "metadata": {"a": 1}}, 400, "metadata"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [99999]}, 400, "99999"),
    ("/nowhere", {}, 404, "/nowhere"),
]


def test_errors_have_openais_format(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        for path, body, status, word in MISTAKES:
            response = await client.post(path, json=body)
            assert response.status_code == status, (path, body, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert word in error["message"], (body, error)
        raw = {
            b"{": "JSON",
            b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}": "",
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}': "surrogate",
            b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}': "",
            b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}': "",
        }
        for content, word in raw.items():
            response = await client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 400, (content[:80], response.text)
            assert word in response.json()["error"]["message"]
        assert (await client.get(CHAT)).status_code == 405

    run(in_process, test)


def test_errors_name_the_parameter(in_process) -> None:
    cases = [
        (TEXT, {"prompt": "a", "logprobs": 50}, "logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "top_p": 7}, "top_p"),
        (CHAT, {"messages": HELLO, "stop_token_ids": [99999]}, "stop_token_ids"),
        (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    ]

    async def test(client: httpx.AsyncClient, _: Service) -> None:
        for path, body, param in cases:
            response = await client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

    run(in_process, test)


def test_null_means_not_set(in_process) -> None:
    """OpenAI's clients send null for parameters that are named but not set."""
    nulls = dict.fromkeys(
        ("n", "echo", "min_tokens", "ignore_eos", "skip_special_tokens", "speculate", "stream", "stop", "logit_bias", "best_of",
         "parallel_tool_calls", "tools", "tool_choice", "logprobs", "functions", "guided_json", "bad_words", "suffix")
    )  # fmt: skip
    call = {"function": {"name": "f", "arguments": None}, "type": None}

    async def test(client: httpx.AsyncClient, _: Service) -> None:
        body = {"max_tokens": 3, "temperature": 0}
        for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "the cat"})):
            plain, given = [(await client.post(path, json=body | prompt | more)).json() for more in ({}, nulls)]
            assert given["choices"] == plain["choices"]
        earlier = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert (await client.post(CHAT, json=body | {"messages": earlier})).status_code == 200
        assert (await client.post(TEXT, json=body | {"prompt": None})).status_code == 400

    run(in_process, test)


def test_guided_choice_bad_words_and_required_tools(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        guided = await ask(client, guided_choice=["cat", "dog"], max_tokens=20)
        assert guided["choices"][0]["message"]["content"] in ("cat", "dog")
        body = {"prompt": "the cat", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        text = (await client.post(TEXT, json=body)).json()["choices"][0]["text"]
        word = next(word for word in text.split() if word.isascii())
        other = (await client.post(TEXT, json=body | {"bad_words": [word]})).json()["choices"][0]["text"]
        assert word in text
        assert word not in other
        body = {"messages": HELLO, "response_format": {"type": "text"}, "tool_choice": "required", "max_tokens": 60}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"const": 1}}}}}
        calls = (await client.post(CHAT, json=body | {"tools": [tool], "parallel_tool_calls": False})).json()
        assert calls["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f", calls

    run(in_process, test)


def test_echo_returns_the_prompt_unchanged(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        prompts = ["<|im_start|>user the  cat<|im_end|>", "naïve ﬁ"]
        for prompt in (prompts, [service.tokenizer.encode(prompt) for prompt in prompts]):
            body = {"prompt": prompt, "max_tokens": 1, "echo": True}
            choices = (await client.post(TEXT, json=body)).json()["choices"]
            for choice, sent in zip(choices, prompts, strict=True):
                assert choice["text"].startswith(sent)

    run(in_process, test)


def test_the_list_of_models_has_one_model(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(await client.get(f"/v1/models/{one['id']}")).json() for one in listed] == listed
        assert (await client.get("/v1/models/some/other")).status_code == 404

    run(in_process, test)


HOSTS = {"localhost": 200, "localhost:8000": 200, "127.0.0.1:80": 200, "[::1]:80": 200, "box": 200, "a.localhost": 200, "": 200}
HOSTS |= {"evil.example": 403, "evil.example.:80": 403, "127.0.0.1.evil.example": 403, "localhost.evil.example:80": 403}


def test_a_local_server_refuses_other_host_names(in_process) -> None:
    """Guards against DNS rebinding: a page whose domain points to 127.0.0.1 has the server's origin, so CORS does not apply."""

    async def statuses(client: httpx.AsyncClient, _: Service) -> dict[str, int]:
        return {host: (await client.get("/v1/models", headers={"Host": host})).status_code for host in HOSTS}

    assert run(in_process, statuses) == HOSTS
    open_to = dict.fromkeys(HOSTS, 200)
    assert run(in_process, statuses, "--trusted-proxies", "127.0.0.1") == open_to
    assert run(in_process, statuses, "--host", "0.0.0.0") == open_to
    assert set(run(in_process, statuses, "--api-key", "k").values()) == {401}


def test_health_needs_no_key_under_a_root_path(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        behind = httpx.ASGITransport(create_app(service), root_path="/llm")  # uvicorn prepends it to each path
        async with httpx.AsyncClient(transport=behind, base_url="http://test") as proxied:
            assert (await proxied.get("/llm/health")).status_code == 200
            assert (await proxied.get("/llm/v1/models")).status_code == 401
            assert "Basic" in (await proxied.get("/llm/")).headers["WWW-Authenticate"]

    run(in_process, test, "--api-key", "right")


def test_the_key_is_required_everywhere_except_for_health(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        paths = (await client.get("/openapi.json", headers={"Authorization": "Bearer right"})).json()["paths"]
        routes = [(method, path) for path, methods in paths.items() for method in methods]
        routes += [("get", "/"), ("get", "/openapi.json"), ("get", "/nowhere")]
        assert len(routes) > 10
        for method, path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic ???"}, {"Authorization": "right"}):
                response = await client.request(method, path, headers=headers)
                assert response.status_code == (200 if path in ("/health", "/ready") else 401), (method, path)
                if path not in ("/health", "/ready"):
                    assert response.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"Authorization": "Bearer right"}, {"Authorization": "Bearer other"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert "Basic" in (await client.get("/")).headers["WWW-Authenticate"]
        password = base64.b64encode(b"anyone:right").decode()
        assert (await client.get("/", headers={"Authorization": f"Basic {password}"})).status_code == 200

    run(in_process, test, "--api-key", "right", "other")


def test_a_caller_that_fills_the_queue_does_not_block_others(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        engine, may_go_on = service.engine.host.loop.engine, threading.Event()
        step = engine.step
        # Holds all answers until all are requested; after that the flood must not complete before the others' answers.
        engine.step = lambda: time.sleep(0.005) or (step() if may_go_on.is_set() else [])
        flood = {"prompt": "a", "n": 9, "max_tokens": 300, "temperature": 1, "ignore_eos": True}
        first, second = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("first", "second"))

        async def until_taken(num_answers: int) -> None:
            async with asyncio.timeout(60):
                while service.engine.num_in_flight < num_answers:
                    await asyncio.sleep(0.005)

        floods = [asyncio.create_task(client.post(TEXT, json=flood, **first)) for _ in range(2)]
        await until_taken(18)
        body = {"messages": HELLO, "max_tokens": 4}
        assert (await client.post(CHAT, json=body, **first)).status_code == 503
        few = [asyncio.create_task(client.post(CHAT, json=body, **second)) for _ in range(2)]
        await until_taken(20)
        assert (await client.post(TEXT, json=flood, **second)).status_code == 503, "the reserve is for few answers"
        may_go_on.set()
        assert [(await one).status_code for one in few] == [200, 200]
        assert not any(task.done() for task in floods)
        for task in floods:
            task.cancel()
        await check_all_free(service)

    run(in_process, test, "--api-key", "first", "second", "--max-num-seqs", "2", "--max-queue", "16")


def test_a_full_queue_is_a_503_with_retry_after(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        body = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        responses = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(12)))
        refused = [response for response in responses if response.status_code == 503]
        assert len(refused) == 12 - 3
        assert all(int(response.headers["Retry-After"]) >= 1 for response in refused)
        assert all(response.json()["error"]["code"] == "overloaded" for response in refused)
        assert {response.status_code for response in responses} == {200, 503}
        assert (await client.post(CHAT, json=body)).status_code == 200

    run(in_process, test, "--max-num-seqs", "2", "--max-queue", "1")


def test_requests_that_are_too_large_are_refused(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        large = json.dumps({"messages": [{"role": "user", "content": "x" * 5000}]}).encode()
        assert (await client.post(CHAT, content=large)).status_code == 413

        async def parts():
            for at in range(0, len(large), 1000):
                yield large[at : at + 1000]

        response = await client.post(CHAT, content=parts(), headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert "--max-request-bytes" in response.json()["error"]["message"]

    run(in_process, test, "--max-request-bytes", "2K")


def test_tokenize_and_detokenize_round_trip(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        found = await ask(client, "/tokenize", prompt="the quick fox é", return_token_strs=True)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert (await ask(client, "/detokenize", tokens=found["tokens"]))["prompt"] == "the quick fox é"
        chat = await ask(client, "/tokenize", messages=HELLO)
        assert (await ask(client, "/detokenize", tokens=chat["tokens"]))["prompt"].endswith("<|im_start|>assistant\n")

    run(in_process, test)


def test_a_final_message_is_continued(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        messages = [*HELLO, {"role": "assistant", "content": "on the"}]
        body = {"continue_final_message": True, "add_generation_prompt": False}
        tokens = (await ask(client, "/tokenize", messages=messages, **body))["tokens"]
        assert (await ask(client, "/detokenize", tokens=tokens))["prompt"].endswith("on the")
        answer = await ask(client, messages=messages, max_tokens=4, temperature=0, **body)
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        other = await ask(client, "/v1/responses", input="hi", max_output_tokens=3, instructions="be brief")
        assert other["status"] == "incomplete"
        assert other["usage"]["output_tokens"] == 3

    run(in_process, test, "--chat-template", "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")


def test_usage_reports_cached_prompt_tokens(in_process) -> None:
    messages = [{"role": "user", "content": "the cat sat on the mat and " * 8}]

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        first = await ask(client, messages=messages, temperature=0, max_tokens=8)
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        answer = first["choices"][0]["message"]
        longer = [*messages, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "why"}]
        second = await ask(client, messages=longer, temperature=0, max_tokens=8, n=2)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens"] - 32 < cached < second["usage"]["prompt_tokens"]
        chunks = await stream(client, messages=longer, max_tokens=2, stream_options={"include_usage": True})
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached
        pool = service.engine.host.loop.engine.pool
        assert (await client.get("/metrics")).text.count(
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="tiny"}} {pool.num_found:.1f}'
        ) == 1
        assert pool.num_found >= 3 * cached

    async def without(client: httpx.AsyncClient, _: Service) -> None:
        for _ in range(2):
            assert "prompt_tokens_details" not in (await ask(client, messages=messages, max_tokens=2))["usage"]

    run(in_process, test)
    run(in_process, without, "--no-enable-prefix-caching")


def test_metrics_have_vllms_names(in_process) -> None:
    async def test(client: httpx.AsyncClient, _: Service) -> None:
        await ask(client, temperature=0, max_tokens=60, ignore_eos=True)
        text = (await client.get("/metrics")).text
        lines = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
        labels = '{engine="0",model_name="tiny"}'
        assert lines[f"vllm:generation_tokens_total{labels}"] == 60
        assert lines[f"vllm:time_to_first_token_seconds_count{labels}"] == 1
        assert lines[f"vllm:e2e_request_latency_seconds_count{labels}"] == 1
        assert lines[f"vllm:request_queue_time_seconds_count{labels}"] == 1
        assert lines[f"vllm:kv_cache_usage_perc{labels}"] == 0
        assert lines[f"vllm:prefix_cache_queries_total{labels}"] == lines[f"vllm:prompt_tokens_total{labels}"] > 0
        assert lines[f"vllm:prefix_cache_hits_total{labels}"] == 0
        assert lines['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == 1
        drafts = lines[f"vllm:spec_decode_num_drafts_total{labels}"]
        assert drafts > 0
        at = [value for name, value in lines.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
        assert sum(at) == lines[f"vllm:spec_decode_num_accepted_tokens_total{labels}"]
        assert (await client.get("/version")).json()["version"]

    run(in_process, test)


def test_health_distinguishes_loading_ready_and_failing(tiny_folder: Path) -> None:
    async def main() -> None:
        build_now = threading.Event()

        def build_later(*given: Any) -> Any:
            assert build_now.wait(60)
            return build(*given)

        service = Service(flags.parse([str(tiny_folder), *TINY_FLAGS]), build=build_later)
        app = create_app(service)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

                async def health() -> tuple[int, str]:
                    response = await client.get("/health")
                    return response.status_code, response.json()["status"]

                assert await health() == (503, "loading")
                for path in (CHAT, TEXT, "/v1/responses", "/tokenize", "/detokenize"):
                    bodies = {CHAT: {"messages": HELLO}, "/v1/responses": {"input": "a"}}
                    body = bodies.get(path, {"prompt": "a", "tokens": [1]})
                    response = await client.post(path, json=body)
                    assert response.status_code == 503
                    assert int(response.headers["Retry-After"]) >= 1
                build_now.set()
                await wait_until_ready(client)
                assert await health() == (200, "ready")
                service.engine.host.loop.engine.step = lambda: 1 / 0
                for _ in range(MAX_FAILURES):
                    assert (await health())[0] == 200
                    await ask(client, status=500, max_tokens=4)
                assert await health() == (503, "failing")

    asyncio.run(main())


def test_idle_preparation_starts_only_after_a_quiet_period(in_process, monkeypatch) -> None:
    """Requests come in bursts; preparation between two of them would delay the second."""

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await ask(client, max_tokens=4)
        loop, quiet = service.engine.host.loop, []
        loop.engine.executor.idle = lambda: quiet.append(time.monotonic() - loop._busy_until) or len(quiet) < 3
        for _ in range(3):
            await ask(client, max_tokens=4)
        async with asyncio.timeout(30):
            while len(quiet) < 3:
                await asyncio.sleep(0.02)
        assert min(quiet) >= engine_loop.QUIET_SECONDS

    monkeypatch.setattr(engine_loop, "QUIET_SECONDS", 1.0)
    run(in_process, test)


def test_a_failing_step_fails_only_its_requests(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        engine = service.engine.host.loop.engine
        step = engine.step

        def fail():
            raise RuntimeError("secret internals")

        for round_ in range(3):
            assert (await client.get("/health")).json() == {"status": "ready"}
            engine.step = fail
            told = await ask(client, status=500, max_tokens=4)
            assert "secret" not in json.dumps(told)
            engine.step = step
            if round_ == 0:  # the engine survives single failures
                assert (await ask(client, max_tokens=4))["usage"]["completion_tokens"] >= 1
                engine.step = fail
                await ask(client, status=500, max_tokens=4)
        assert (await client.get("/health")).status_code == 503
        await ask(client, status=503, max_tokens=4)

    run(in_process, test)


@pytest.mark.parametrize("stop_after", [0, 3])
def test_running_requests_get_503_at_shutdown(in_process, stop_after: int) -> None:
    async def main() -> None:
        async with in_process() as (client, service):
            engine = service.engine.host.loop.engine
            step = engine.step
            engine.step = lambda: (time.sleep(0.005), step())[1]  # still running at shutdown
            asked = asyncio.create_task(client.post(CHAT, json={"messages": HELLO, "max_tokens": 400, "ignore_eos": True}))
            while len(engine.requests) < 1:
                await asyncio.sleep(0.001)
            await asyncio.sleep(stop_after / 1000)
            await service.engine.stop()
            assert (await asked).status_code == 503

    asyncio.run(main())
