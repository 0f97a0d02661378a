"""A fake vLLM server: our decoder behind vLLM's protocol, with hidden states written to files."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import save

from fledge.models.decoder import Decoder, causal_attend


@dataclass
class FakeEndpoint:
    decoder: Decoder
    layers: tuple[int, ...]
    folder: Path
    max_model_len: int = 512
    max_answer: int = 512  # upper limit of max_tokens
    hands_out_states: bool = True
    failures: int = 0  # the number of requests answered with 503 first
    write_seconds: float = 0.0  # time from the response until the states file is complete
    extra_token: bool = False  # write states for a prompt with one more token
    requests: list[list[int]] = field(default_factory=list)
    url: str = ""

    @torch.no_grad()
    def complete(self, body: dict) -> dict:
        prompt = body["prompt"]
        self.requests.append(prompt)
        tokens, stop_ids, log_probability = list(prompt), set(body.get("stop_token_ids", ())), 0.0
        for _ in range(min(body["max_tokens"], self.max_answer)):
            out = self.run(tokens)
            scores = self.decoder.logits(out.hidden_ND[-1]).log_softmax(-1)
            tokens.append(int(scores.argmax()))
            log_probability = float(scores.max())
            if tokens[-1] in stop_ids:
                break
        choice = {
            "token_ids": tokens[len(prompt) :],
            "logprobs": {"token_logprobs": [log_probability]},
            "finish_reason": "stop" if tokens[-1] in stop_ids else "length",
        }
        answer: dict = {"choices": [choice]}
        if self.hands_out_states:
            path = self.folder / f"request-{len(self.requests)}-{threading.get_ident()}.safetensors"
            self.write(path, [*prompt, 1] if self.extra_token else prompt)
            answer["kv_transfer_params"] = {"hidden_states_path": str(path)}
        return answer

    def run(self, tokens: list[int]):
        return self.decoder(torch.tensor(tokens), torch.arange(len(tokens)), causal_attend(), self.layers)

    def write(self, path: Path, tokens: list[int]) -> None:
        """Writes states as vLLM does: the lock is held when the response is sent, and the file is complete later."""
        states = torch.stack(self.run(tokens).taps, 1)
        data = save({"hidden_states": states, "token_ids": torch.tensor(tokens)})
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            path.write_bytes(data[: len(data) // 2])
            time.sleep(self.write_seconds)
            path.write_bytes(data)
            os.close(lock)

        threading.Thread(target=finish).start()


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """Runs the server. It also serves the folder's files over HTTP, as a file server next to vLLM would."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, content: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply(json.dumps({"data": [{"id": "tiny", "max_model_len": endpoint.max_model_len}]}).encode())
                return
            file = endpoint.folder / Path(self.path).name
            self.reply(file.read_bytes()) if file.exists() else self.reply(b"", 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if endpoint.failures > 0:
                endpoint.failures -= 1
                self.reply(b'{"error": {"message": "still loading"}}', 503)
            else:
                self.reply(json.dumps(endpoint.complete(body)).encode())

    endpoint.folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
