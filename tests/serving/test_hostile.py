"""The hostile set: hundreds of requests that are invalid, huge, deeply nested or not HTTP, sent to one server.

Each gets a clear 4xx or a correct answer. A background stream never pauses for a second, memory is freed, and the log has no
error of the server's own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.conftest import TINY_FLAGS
from tests.serving.thread_server import ThreadServer

CHAT, TEXT, RESPONSES, TOKENIZE, DETOKENIZE = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize",
)  # fmt: skip
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2},
    TEXT: {"prompt": "the cat", "max_tokens": 2},
    RESPONSES: {"input": "the cat", "max_output_tokens": 2},
    TOKENIZE: {"prompt": "the cat"},
    DETOKENIZE: {"tokens": [5, 6]},
}
# The longest that the background stream or the event loop may pause, and how much memory may grow.
# Measured growth: 91 MiB, and 194 MiB before the heap was trimmed.
MAX_PAUSE, MAX_GROWTH = 1.0, 160 << 20

# Every field is sent with every kind of wrong value
SAMPLING = [
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
    "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens", "stream", "stream_options",
    "structured_outputs", "response_format", "user", "best_of", "prompt_logprobs", "max_tokens", "logprobs",
]  # fmt: skip
FIELDS = {
    CHAT: [*SAMPLING, "messages", "tools", "tool_choice", "chat_template_kwargs", "top_logprobs", "max_completion_tokens"],
    TEXT: ["prompt", "echo", "suffix", "logprobs", "n", "max_tokens", "stop"],
    RESPONSES: ["input", "instructions", "text", "tools", "max_output_tokens", "metadata", "temperature"],
    TOKENIZE: ["prompt", "messages", "tools", "add_special_tokens", "return_token_strs", "chat_template_kwargs"],
    DETOKENIZE: ["tokens", "model"],
}
WRONG = {
    "text": "x",
    "negative": -1,
    "enormous": 2**80,
    "float": 1e308,
    "object": {"a": {"b": []}},
    "list": [[], {}, None, 1.5],
    "long text": "the cat " * 20_000,
}

# Bodies as bytes: invalid JSON, or very large
DEEP = b"[" * 3000 + b"]" * 3000
RAW_BODIES = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"5",
    "a text": b'"x"',
    "null": b"null",
    "truncated": b'{"messages": [',
    "deep": b'{"messages": ' + DEEP + b"}",
    "deep in an unknown field": b'{"messages": [{"role": "user", "content": "a"}], "unknown": ' + DEEP + b"}",
    "not a number": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "infinite": b'{"messages": [{"role": "user", "content": "a"}], "temperature": -Infinity}',
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    "a lone surrogate in a key": b'{"messages": [{"role": "user", "content": "a"}], "metadata": {"\\ud800": 1}}',
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "UTF-16": '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}',
    "the same key many times": b'{"messages": [{"role": "user", "content": "a"}]' + b', "max_tokens": 1' * 20_000 + b"}",
    "a number of many digits": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
    "zeros": bytes(5000),
    "numbers for messages": b'{"messages": [' + b"0," * 1_000_000 + b"0]}",
    "objects for messages": b'{"messages": [' + b"{}," * 500_000 + b"{}]}",
    "a million stop strings": b'{"messages": [{"role": "user"}], "stop": [' + b'"a",' * 900_000 + b'"a"]}',
    "a million stop ids": b'{"messages": [{"role": "user"}], "stop_token_ids": [' + b"1," * 1_900_000 + b"1]}",
    "a million tools": b'{"messages": [{"role": "user"}], "tools": [' + b"1," * 1_900_000 + b"1]}",
    "a million keys": b"{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}",
    "a long key": b'{"messages": [{"role": "user"}], "' + b"k" * 3_000_000 + b'": 1}',
    "one long text": b'{"messages": [{"role": "user", "content": "' + b"a" * 4_000_000 + b'"}]}',
    "many spaces": b'{"messages": [{"role": "user", "content": "' + b" " * 4_000_000 + b'"}]}',
    "too large": b" " * (5 << 20),
}

BIASES = {str(token): 1 for token in range(49_152)}
STOPS = [f"stop {number}" for number in range(5000)]
HUGE: dict[str, tuple[str, bytes]] = {
    "floats for tokens": (TEXT, b'{"prompt": [' + b"1.5," * 799_999 + b"1.5]}"),
    "numbers for messages": (CHAT, b'{"messages": [' + b"0," * 1_299_999 + b"0]}"),
    "numbers for stops": (CHAT, b'{"messages": [{"role": "user"}], "stop": [' + b"0," * 1_299_999 + b"0]}"),
    "prompts times n times biases": (TEXT, json.dumps({"prompt": ["a"] * 32, "n": 16, "logit_bias": BIASES}).encode()),
    "prompts times n times stops": (TEXT, json.dumps({"prompt": ["a"] * 128, "n": 128, "stop": STOPS}).encode()),
    "as many prompts as are taken": (TEXT, json.dumps({"prompt": ["the cat " * 20] * 128, "max_tokens": 2}).encode()),
    "a long text by token": (TOKENIZE, json.dumps({"prompt": "the cat " * 131_000, "return_token_strs": True}).encode()),
    "a long reasoning text": (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "a", "reasoning_content": "the cat " * 490_000}]}).encode(),
    ),
}


# Valid JSON with unusual values
def call(arguments: str) -> list[dict[str, Any]]:
    made = {"function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [made]}]


def tool(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "tool_choice": "required"}


SHAPES: dict[str, dict[str, Any]] = {
    "a stop token outside the vocabulary": {"stop_token_ids": [2_000_000_000], "min_tokens": 1},
    "every token a stop token": {"stop_token_ids": list(range(380)), "min_tokens": 1, "temperature": 0.7},
    "every token but one a stop token": {"stop_token_ids": list(range(379)), "min_tokens": 1, "temperature": 0.7},
    "every token biased down": {"logit_bias": {str(n): -100 for n in range(380)}},
    "every token biased up": {"logit_bias": {str(n): 100 for n in range(380)}, "temperature": 2.0},
    "a bias of a name": {"logit_bias": {"x": 1}},
    "a bias of a negative id": {"logit_bias": {"-1": 1}},
    "a bias of a huge id": {"logit_bias": {"9" * 4000: 1}},
    "a bias of too many digits": {"logit_bias": {"9" * 5000: 1}},
    "a bias with spaces": {"logit_bias": {" 5 ": 1}},
    "more answers than batch rows": {"n": 128},
    "answers times choices": {"n": 16, "logprobs": True, "top_logprobs": 20},
    "a thousand stop strings": {"stop": ["x" * 20] * 1000},
    "long stop strings": {"stop": ["x" * 10_000]},
    "stop strings that share a beginning": {"stop": ["a" * n for n in range(1, 60)]},
    "an empty stop string": {"stop": ["a", ""]},
    "stop strings of emoji": {"stop": ["👩‍👩‍👧‍👦", "\u0000", "\u202e"]},
    "all penalties": {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 100, "temperature": 100},
    "a temperature near zero": {"temperature": 1e-320},
    "a large temperature": {"temperature": 1e300},
    "a tiny top_p": {"top_p": 1e-320},
    "top_k of all and min_p": {"top_k": 2**31 - 1, "min_p": 1},
    "the smallest seed": {"seed": -(2**63), "n": 4},
    "the largest seed": {"seed": 2**63 - 1, "n": 4},
    "min_tokens above max_tokens": {"min_tokens": 1000},
    "role with control tokens": {"messages": [{"role": "user<|im_end|>", "content": "x"}]},
    "a very long role": {"messages": [{"role": "r" * 10_000, "content": "x"}]},
    "name with control tokens": {"messages": [{"role": "user", "name": "<|im_end|>", "content": "x"}]},
    "an unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "no content": {"messages": [{"role": "user"}]},
    "content of many parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]},
    "content of unknown parts": {"messages": [{"role": "user", "content": [{"type": "video", "text": "a"}]}]},
    "a thousand messages": {"messages": [{"role": "user", "content": "a"}] * 1000},
    "control characters": {"messages": [{"role": "user", "content": "".join(map(chr, range(32))) * 8}]},
    "right to left": {"messages": [{"role": "user", "content": "\u202e\u2066\ufeff\u200b" * 20}]},
    "combining marks": {"messages": [{"role": "user", "content": "e" + "\u0301" * 1000}]},
    "templates in the text": {"messages": [{"role": "user", "content": "{{ 7 * 7 }}{% for i in range(10**9) %}{% endfor %}"}]},
    "template arguments: self": {"chat_template_kwargs": {"self": 1}},
    "template arguments: messages": {"chat_template_kwargs": {"messages": []}},
    "template arguments: tools": {"chat_template_kwargs": {"tools": 5}},
    "template arguments: chat_template": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    "template arguments: dunder": {"chat_template_kwargs": {"__class__": 1, "": 2, "a b": 3}},
    "template arguments: range": {"chat_template_kwargs": {"range": "x", "raise_exception": 1}},
    "template arguments: add_generation_prompt": {"chat_template_kwargs": {"add_generation_prompt": [1]}},
    "arguments of many digits": {"messages": call("9" * 5000)},
    "arguments deep": {"messages": call("[" * 900 + "]" * 900)},
    "arguments very deep": {"messages": call("[" * 100_000 + "]" * 100_000)},
    "arguments with a lone surrogate": {"messages": call('{"a": "\\ud800"}')},
    "arguments not finite": {"messages": call('{"a": NaN}')},
    "arguments not JSON": {"messages": call("{")},
    "arguments empty": {"messages": call("")},
    "tools: $defs a text": tool({"$defs": "abc"}),
    "tools: $defs a number": tool({"$defs": 5}),
    "tools: $ref without a target": tool({"$ref": "#/$defs/none"}),
    "tools: $ref to a file": tool({"$ref": "file:///etc/passwd"}),
    "tools: $ref to itself": tool({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "tools: an unknown type": tool({"type": "spaceship"}),
    "tools: properties a list": tool({"type": "object", "properties": []}),
    "tools: required a number": tool({"type": "object", "required": 5}),
    "tools: the same name twice": {"tools": [{"type": "function", "function": {"name": "f"}}] * 2, "tool_choice": "required"},
    "tools: a choice of an undeclared tool": {"tools": [], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    "an unknown response format": {"response_format": {"type": "xml"}},
    "a format and a grammar": {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    "two grammars": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "stream options without a stream": {"stream_options": {"include_usage": True}},
    "a long model name": {"model": "x" * 10_000},
    "a model name with escapes": {"model": "\x1b[2J\r\nforged"},
    "unknown fields": {f"field{n}": n for n in range(1000)},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex that expands": {"regex": ".?" * 3000},
    "regex that expands late": {"regex": "[0-9]{3}((.{0,60}){0,60}){0,60}x"},
    "regex of nested counts": {"regex": "((a{0,200}){0,200}){0,200}"},
    "regex unbalanced": {"regex": "(((("},
    "regex of an unclosed class": {"regex": "[a"},
    "regex empty": {"regex": ""},
    "regex with look-ahead": {"regex": "(?=a)b"},
    "regex with a back reference": {"regex": r"(a)\1"},
    "regex too long": {"regex": "a" * 70_000},
    "grammar without a root": {"grammar": 'a ::= "b"'},
    "grammar of a rule that is itself": {"grammar": "root ::= root"},
    "grammar with left recursion": {"grammar": 'root ::= root "a" | "a"'},
    "grammar empty": {"grammar": ""},
    "grammar of an unknown rule": {"grammar": "root ::= nowhere"},
    "grammar of empty loops": {"grammar": 'root ::= (""*)*'},
    "grammar ambiguous": {"grammar": "root ::= a+\na ::= b+\nb ::= c+\nc ::= [a-z]+"},
    "grammar of bytes": {"grammar": "root ::= \x00"},
    "grammar too long": {"grammar": 'root ::= "' + "a" * 70_000 + '"'},
    "schema in text, deep": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "schema in text, not JSON": {"json": "{"},
    "schema in text, a list": {"json": "[]"},
    "schema in text, a number of many digits": {"json": '{"minimum": ' + "9" * 5000 + "}"},
    "schema: false": {"json": False},
    "schema: true": {"json": True},
    "schema: empty": {"json": {}},
    "schema: contradiction": {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
    "schema: an impossible length": {"json": {"type": "string", "minLength": 10**9}},
    "schema: a huge array": {"json": {"type": "array", "minItems": 10**9}},
    "schema: a pattern that expands": {"json": {"type": "object", "patternProperties": {"(.{0,100}){0,100}": {}}}},
    "schema: a bad pattern": {"json": {"type": "string", "pattern": "(("}},
    "schema: a reference to itself": {"json": {"$ref": "#"}},
    "schema: a reference with line breaks": {"json": {"$ref": "#/a\n12:00 ERROR forged"}},
    "schema: wrong kinds": {"json": {"type": 5, "enum": "x", "required": {}}},
    "schema: an enum of many": {"json": {"enum": [f"value {n}" for n in range(1500)]}},
    "schema: many properties": {"json": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(500)}}},
    "choice without entries": {"choice": []},
    "choice of an empty text": {"choice": [""]},
    "choice of many": {"choice": [f"choice {n}" for n in range(1000)]},
    "choice of control characters": {"choice": ["\u0000\u001b", "\ud7ff"]},
}

# Raw bytes sent over the connection
GOOD = json.dumps(BASE[CHAT]).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WIRE = {
    "nothing": b"",
    "line breaks": b"\r\n\r\n\r\n",
    "zeros": bytes(2000),
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "an unknown HTTP version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
    "an unknown method": b"BREW /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a method of symbols": b"G<T /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path upwards": b"GET /../../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a path upwards, encoded": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a path with a zero": b"GET /health%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a path with line breaks": b"GET /health%0d%0aX:y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a path that is not UTF-8": b"GET /%ff%fe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a path with raw bytes": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long path": b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a whole URL": b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n",
    "a header with a space": b"GET /health HTTP/1.1\r\nHost: x\r\nX : y\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\nConnection: close\r\n\r\n",
    "a header of zeros": b"GET /health HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
    "a length below zero": HEAD + b"Content-Length: -5\r\n\r\n" + GOOD,
    "a length that is no number": HEAD + b"Content-Length: x\r\n\r\n" + GOOD,
    "a length of many digits": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + GOOD,
    "a length in other digits": HEAD + "Content-Length: ٣\r\n\r\n".encode() + GOOD,
    "a length too long": HEAD + b"Content-Length: 99999\r\n\r\n" + GOOD,
    "a length too short": HEAD + b"Content-Length: 5\r\n\r\n" + GOOD,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + GOOD,
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks of a wrong size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "chunks of a huge size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + GOOD,
    "chunks without an end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    "chunks of one byte": CHUNKED + b"".join(b"1\r\n%c\r\n" % c for c in GOOD) + b"0\r\n\r\n",
    "an unknown encoding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + GOOD,
    "compressed": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + bytes(20),
    "another type": HEAD.replace(b"application/json", b"text/plain") + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
    "no type": HEAD.replace(b"Content-Type: application/json\r\n", b"") + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
    "a form": HEAD.replace(b"application/json", b"multipart/form-data; boundary=x") + b"Content-Length: 5\r\n\r\n--x--",
    "an upgrade": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
    "a hundred pipelined requests": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 100,
    "a request, then invalid bytes": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + b"\x00\x01\x02",
}  # fmt: skip


SILENT = ("nothing", "line breaks")  # no request, so no answer


class Machine(threading.Thread):
    """Measures pauses that the server causes, without those that the machine's other load causes.

    A pause of the server is the longer of two times: the CPU time of this process during it (which covers the interpreter's
    lock), and its length minus the lateness of a thread that only sleeps (which covers waits for locks, full pipes and files).
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.lateness = 0.0  # sum over all sleeps

    def run(self) -> None:
        while True:
            due = time.monotonic() + 0.02
            time.sleep(0.02)
            self.lateness += time.monotonic() - due

    def now(self) -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), self.lateness

    def pause_since(self, then: tuple[float, float, float]) -> float:
        wall, busy, late = (new - old for new, old in zip(self.now(), then, strict=True))
        return max(min(wall, busy), wall - late)


MACHINE = Machine()
MACHINE.start()


class BackgroundStream(threading.Thread):
    """Streams one answer after the other and measures the longest pause between events."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.stopping = url, threading.Event()
        self.longest, self.problems, self.num_events = 0.0, [], 0

    def run(self) -> None:
        body = {"prompt": "the quick brown", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.stopping.is_set():
                last = MACHINE.now()
                with client.stream("POST", TEXT, json=body) as response:
                    if response.status_code != 200:
                        self.problems.append(response.status_code)
                    for line in response.iter_lines():
                        self.longest = max(self.longest, MACHINE.pause_since(last))
                        last = MACHINE.now()
                        self.num_events += 1
                        if '"error"' in line:
                            self.problems.append(line[:200])


def test_time_spent_waiting_counts_as_a_pause() -> None:
    then = MACHINE.now()
    time.sleep(0.3)  # as a handler that waits for a lock would
    assert MACHINE.pause_since(then) > 0.15


def resident_bytes() -> int:
    """The memory in use. First returns freed memory that the C library keeps (100 MiB after the hostile set) to the system."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class LoopWatch:
    """Records how late the server's event loop runs a timer at most. Every stream waits as long."""

    def __init__(self, server: ThreadServer) -> None:
        self.loop, self.longest = server.service.engine.event_loop, 0.0
        self.loop.call_soon_threadsafe(self._wait)

    def _wait(self) -> None:
        self.loop.call_later(0.1, self._look, MACHINE.now())

    def _look(self, then: tuple[float, float, float]) -> None:
        self.longest = max(self.longest, MACHINE.pause_since(then) - 0.1)
        self._wait()


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ThreadServer]:
    limits = ["--max-grammar-seconds", "1", "--max-grammar-memory", "256M", "--header-timeout", "2", "--body-timeout", "2"]
    with ThreadServer([str(tiny_folder), *TINY_FLAGS, *limits]) as running:
        with running.client() as client:  # one-time allocations must not count as growth
            client.post(CHAT, json=BASE[CHAT] | {"structured_outputs": {"choice": ["a"]}})
        running.before, running.watch = resident_bytes(), LoopWatch(running)
        background = running.background = BackgroundStream(running.url)
        background.start()
        yield running
        background.stopping.set()
        background.join(60)


@pytest.fixture(scope="module")
def client(server: ThreadServer) -> Iterator[httpx.Client]:
    with server.client(timeout=30) as opened:
        yield opened


def check_answer(path: str, answer: dict[str, Any]) -> None:
    """Checks that an answer is complete and has the format of the API."""
    assert answer.get("error") is None
    if path in (CHAT, TEXT):
        assert answer["choices"]
        for number, choice in enumerate(answer["choices"]):
            assert choice["index"] == number
            assert choice["finish_reason"] in ("stop", "length", "tool_calls")
            text = choice["text"] if path == TEXT else choice["message"]["content"]
            assert isinstance(text, str) or choice["message"]["tool_calls"]
        usage = answer["usage"]
        assert usage["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    elif path == "/v1/responses":
        assert answer["status"] in ("completed", "incomplete")
        assert answer["output"][-1]["content"][0]["type"] == "output_text"
    elif path == "/tokenize":
        assert answer["count"] == len(answer["tokens"])
    else:
        assert isinstance(answer["prompt"], str)


def check(response: httpx.Response) -> None:
    """Checks that the response is a clear 4xx or a valid answer."""
    if response.status_code == 200:
        path = response.request.url.path
        if "event-stream" not in response.headers["content-type"]:
            return check_answer(path, response.json())
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        if path != "/v1/responses":
            assert events.pop() == "[DONE]"
        assert all("error" not in (one := json.loads(event)) or one["error"] is None for event in events)
        if path != "/v1/responses":
            ended = [one for event in events for one in json.loads(event)["choices"] if one["finish_reason"] is not None]
            assert ended
        return None
    assert 400 <= response.status_code < 500, (response.status_code, response.text[:300])
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 5 < len(error["message"]) < 1000
    assert error["message"].isprintable()
    assert len(response.content) < 2000
    return None


FIELD_CASES = [(path, field, kind) for path, fields in FIELDS.items() for field in fields for kind in WRONG]


@pytest.mark.parametrize(("path", "field", "kind"), FIELD_CASES)
def test_fields(client: httpx.Client, path: str, field: str, kind: str) -> None:
    check(client.post(path, json=BASE[path] | {field: WRONG[kind]}))


@pytest.mark.parametrize("name", RAW_BODIES)
def test_bodies(client: httpx.Client, name: str) -> None:
    check(client.post(CHAT, content=RAW_BODIES[name], headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize("name", HUGE)
def test_huge(client: httpx.Client, name: str) -> None:
    path, body = HUGE[name]
    check(client.post(path, content=body, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(client: httpx.Client, name: str) -> None:
    check(client.post(CHAT, json=BASE[CHAT] | SHAPES[name]))


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(client: httpx.Client, name: str) -> None:
    check(client.post(CHAT, json=BASE[CHAT] | {"max_tokens": 12, "structured_outputs": GRAMMARS[name]}))


@pytest.mark.parametrize("name", WIRE)
def test_wire(server: ThreadServer, name: str) -> None:
    """Every request, also one that is not HTTP, gets an answer below 500; without a request the connection is closed."""
    answer = server.raw(WIRE[name])
    if name in SILENT:
        assert answer == b""
        return
    assert 200 <= int(answer.split(b" ", 2)[1]) < 500, answer[:300]
    assert b"root:" not in answer


def test_pauses_log_and_memory_at_the_end(server: ThreadServer, client: httpx.Client) -> None:
    """Runs last. Checks the pauses, the log and memory, and that nothing is left in the engine."""
    assert len(FIELD_CASES) + len(RAW_BODIES) + len(HUGE) + len(SHAPES) + len(GRAMMARS) + len(WIRE) > 400
    background = server.background
    assert background.num_events > 10
    assert not background.problems
    assert background.longest < MAX_PAUSE, f"the stream paused for {background.longest:.2f} s of work"
    longest_stall = server.watch.longest
    assert longest_stall < MAX_PAUSE, f"the event loop was {longest_stall:.2f} s of work late"
    assert client.get("/health").status_code == 200
    background.stopping.set()
    background.join(60)
    deadline = time.monotonic() + 20
    while server.service.engine.num_in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.service.engine.num_in_flight
    engine = server.service.engine.host.loop.engine
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages
    assert not server.log.tracebacks, server.log.tracebacks[:5]
    assert not any("forged" in line for line in server.log.lines)
    grown = resident_bytes() - server.before
    print(f"longest stall {longest_stall:.2f} s, longest pause {background.longest:.2f} s, memory {grown >> 20:+} MiB")
    assert grown < MAX_GROWTH, f"memory grew by {grown >> 20} MiB"
