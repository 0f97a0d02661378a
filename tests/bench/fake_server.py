"""An OpenAI-compatible server without a model: correct, or with the given faults."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import httpx

from fledge.bench.conform_client import Endpoint
from fledge.bench.conform_values import TOOLS

NEVER = "zzz"
SAID = "the sky sea sun is was blue red deep with and of a to in light far near wave sand stone wind rain"
WORDS = [*SAID.split(), NEVER]
CITY = {"city": "Rome", "note": "warm", "days": 3, "coastal": False, "seasons": ["spring", "autumn"]}


class FakeServer:
    """`faults`: names of the faults; the tests state which check must find each one."""

    def __init__(self, *faults: str) -> None:
        self.faults, self.in_flight, self.drafts = set(faults), 0, 0
        self.seen: dict[str, int] = {}

    def endpoint(self, **extra: Any) -> Endpoint:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.handle), base_url="http://fake")
        return Endpoint(client, "fake", extra)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        if path == "/metrics":
            if "no-metrics" in self.faults:
                return httpx.Response(404)
            return httpx.Response(200, text=f"vllm:spec_decode_num_drafts_total {self.drafts}.0\n")
        body = json.loads(request.content) if request.content else {}
        if path == "/tokenize":
            if "no-tokenize" in self.faults:
                return httpx.Response(404, json={"error": {"message": "Not Found"}})
            return httpx.Response(200, json={"tokens": [WORDS.index(word) for word in body["prompt"].split()]})
        if not path.endswith("/completions"):
            return httpx.Response(404)
        self.in_flight += 1
        try:
            await asyncio.sleep(0.002)
            return self.answer(body, "chat" in path)
        finally:
            self.in_flight -= 1

    def answer(self, body: dict[str, Any], chat: bool) -> httpx.Response:
        faults, key = self.faults, json.dumps(body, sort_keys=True)
        self.seen[key] = self.seen.get(key, 0) + 1
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if "refuses-tools" in faults and "tools" in body:
            return httpx.Response(400, json={"error": {"message": "tools are not for me"}})
        if "error-500" in faults and len(prompt) > 1000:
            return httpx.Response(500, text="Internal Server Error")
        if "short-context" in faults and len(prompt) > 3500:
            return httpx.Response(400, json={"error": {"message": "too long"}})
        speculates = body.get("speculate", True)
        self.drafts += 5 if speculates or "reference-drafts" in faults else 0
        n = 1 if "n-short" in faults else body.get("n", 1)
        answers = [self.one(body, prompt, speculates, index, self.seen[key]) for index in range(n)]
        num_tokens = sum(one["num_tokens"] for one in answers)
        if "miscounts-stream" in faults and body.get("stream"):
            num_tokens += 1
        if "overruns" in faults:
            num_tokens += 1000
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": num_tokens}
        if body.get("include_speculation"):
            usage["speculation"] = {"steps": 5 if speculates else 0}
        if body.get("stream"):
            return self.stream(answers, usage, chat)
        choices = [self.choice(one, index, chat) for index, one in enumerate(answers)]
        return httpx.Response(200, json={"choices": choices, "usage": usage})

    def one(self, body: dict[str, Any], prompt: str, speculates: bool, index: int, times: int) -> dict[str, Any]:
        """One answer: tokens (or a call), finish_reason and log-probabilities."""
        faults, sampled = self.faults, body["temperature"] > 0
        seed = 0 if "seed-ignored" in faults else body.get("seed")
        draw: Any = ("sampled", seed, 0 if "n-same" in faults else index) if sampled else "greedy"
        if "seed-forgotten" in faults and sampled:
            draw = random.random()
        if "n-greedy-differs" in faults and index and not sampled:
            draw = index
        chance = random.Random(f"{prompt[-40:]}|{draw}")
        tokens = [chance.choice(WORDS[:-1]) + " " for _ in range(body["max_tokens"])]
        wrong = "lossy" in faults and speculates and not sampled
        wrong |= "lossy-seeded" in faults and speculates and sampled
        wrong |= "prefix" in faults and times > 1 and len(prompt) > 1000
        wrong |= "load" in faults and self.in_flight > 8
        wrong |= "logprobs-change-text" in faults and "logprobs" in body
        wrong |= "stream-changes" in faults and bool(body.get("stream"))
        if wrong:
            tokens[5] = NEVER + " "
        finish, calls = "length", []
        structured = body.get("structured_outputs") or {}
        if "response_format" in body and "ignores-schema" not in faults:
            value = CITY | ({"city": "Berlin"} if "off-schema" in faults else {})
            text = json.dumps(value)
            tokens, finish = [text[:-5] if "bad-json" in faults else text], "stop"
        elif "regex" in structured and "ignores-regex" not in faults:
            tokens, finish = ["Abc-12" if "bad-regex" in faults else f"Abc-{chance.randrange(100, 999)}"], "stop"
        elif "choice" in structured:
            chosen = chance.choice(structured["choice"])
            tokens, finish = [chosen[:4] if "bad-choice" in faults else chosen], "stop"
        elif "tools" in body:
            call = {"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}
            if "off-schema-call" in faults:
                call["arguments"]["days"] = 30
            if "unknown-tool" in faults:
                call["name"] = "launch_rocket"
            tokens = []
            if "lost-call" in faults:
                tokens = [f"<tool_call>{json.dumps(call)}</tool_call>"]
            elif "no-call" not in faults:
                calls = [(call["name"], json.dumps(call["arguments"])[: -3 if "bad-arguments" in faults else None])]
            finish = "stop" if "tool-finish" in faults or not calls else "tool_calls"
            assert body["tools"] == TOOLS
        tokens, finish = self.stopped(body, tokens, finish)
        return {
            "tokens": tokens,
            "calls": calls,
            "finish": finish,
            "num_tokens": len(tokens) + 10 * len(calls),
            "logprobs": self.logprobs(tokens, body) if body.get("logprobs") else None,
        }

    def stopped(self, body: dict[str, Any], tokens: list[str], finish: str) -> tuple[list[str], str]:
        faults = self.faults
        for stop in body.get("stop") or ():
            text = "".join(tokens)
            at = text.find(stop)
            if at >= 0 and "ignores-stop" not in faults:
                kept = text[: at + (len(stop) if "stop-leaks" in faults else 0)]
                tokens, finish = [word + " " for word in kept.split(" ")], "length" if "stop-reason" in faults else "stop"
                tokens[-1] = tokens[-1][:-1]
        for stop in body.get("stop_token_ids") or ():
            if WORDS[stop] + " " in tokens and "ignores-stop-ids" not in faults:
                at = tokens.index(WORDS[stop] + " ")
                tokens, finish = tokens[:at], "stop"
                if "stop-ids-wrong" in faults:
                    tokens = [*tokens, NEVER]
        return tokens, finish

    def logprobs(self, tokens: list[str], body: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
        faults, result = self.faults, []
        for token in tokens:
            best = 0.21 if "tie" in faults else 0.6
            top = {token: math.log(best)} | {f"{other}": math.log(0.209 if "tie" in faults else 0.09) for other in "ABCD"}
            if "logprob-positive" in faults:
                top = {token: 0.2}
            if "logprob-sum" in faults:
                top["A"] = math.log(0.55)
            if "logprob-not-best" in faults:
                top[token] = math.log(0.01)
            chosen = top[token]
            if "logprob-absent" in faults:
                del top[token]
            if "logprob-stream" in faults and body.get("stream"):
                chosen -= 0.5
                top[token] = chosen
            result.append((token, chosen, top))
        return result[:-3] if "logprob-count" in faults else result

    def choice(self, one: dict[str, Any], index: int, chat: bool) -> dict[str, Any]:
        text, finish = "".join(one["tokens"]), {"index": index, "finish_reason": one["finish"]}
        logprobs = self.logprob_form(one["logprobs"], chat)
        if not chat:
            return finish | {"text": text, "logprobs": logprobs}
        calls = [
            {"id": f"call-{random.random()}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in one["calls"]
        ]
        return finish | {"message": {"role": "assistant", "content": text, "tool_calls": calls}, "logprobs": logprobs}

    @staticmethod
    def logprob_form(entries: list | None, chat: bool) -> Any:
        if entries is None:
            return None
        if not chat:
            tokens, values, tops = ([entry[at] for entry in entries] for at in range(3))
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        return {
            "content": [
                {"token": token, "logprob": value, "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()]}
                for token, value, top in entries
            ]
        }

    def stream(self, answers: list[dict[str, Any]], usage: dict[str, Any], chat: bool) -> httpx.Response:
        faults, events = self.faults, []

        def event(index: int, text: str, finish: str | None = None, **more: Any) -> None:
            logprobs = more.pop("logprobs", None)
            piece = {"delta": {"content": text, **more}} if chat else {"text": text}
            events.append({"choices": [{"index": index, "finish_reason": finish, "logprobs": logprobs, **piece}]})

        for index, one in enumerate(answers):
            entries = one["logprobs"] or []
            for at, token in enumerate(one["tokens"]):
                if "stream-drops" in faults and at == 3:
                    continue
                event(index, token, logprobs=self.logprob_form(entries[at : at + 1], chat) if entries else None)
            for number, (name, arguments) in enumerate(one["calls"]):
                if "stream-call-spaced" in faults:
                    arguments = json.dumps(json.loads(arguments), indent=2)
                call = {"index": number, "id": f"call-{random.random()}", "function": {"name": name, "arguments": ""}}
                if "stream-call-nameless" in faults:
                    del call["id"]
                event(index, "", tool_calls=[call])
                for piece in (arguments[:7], "" if "stream-call-cut" in faults else arguments[7:]):
                    event(index, "", tool_calls=[{"index": number, "function": {"arguments": piece}}])
            if "stream-no-finish" not in faults:
                event(index, "", one["finish"])
            if "stream-goes-on" in faults:
                event(index, "more")
                for earlier in events[:1]:
                    earlier["choices"][0]["delta" if chat else "text"] = {"content": ""} if chat else ""
        if "stream-error" in faults:
            events[-1] = {"error": {"message": "out of memory"}}
        if "stream-no-usage" not in faults:
            at = 1 if "stream-early-usage" in faults else len(events)
            events.insert(at, {"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(one)}\n\n" for one in events]
        if "stream-no-done" not in faults:
            lines.append("data: [DONE]\n\n")
        return httpx.Response(200, text="".join(lines), headers={"content-type": "text/event-stream"})
