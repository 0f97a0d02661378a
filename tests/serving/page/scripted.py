"""A server that serves the page and streams text set by the test, which a real model could not be made to produce."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from fledge.serving import page_files


class ScriptedServer:
    """Use as `with ScriptedServer() as server:` and set `server.text`. Two of three pieces are marked as drafted."""

    def __init__(self) -> None:
        self.text, self.plain_text = "", None  # plain_text: the answer without speculation, if it should differ
        self.piece, self.delay, self.pause_at = 7, 0.0, None  # characters per event, seconds between events, offset to pause at
        self.reasoning, self.finish_reason = False, "stop"
        self.drafter: str | None = "scripted"
        self.metrics = ""
        self.learning: dict[str, Any] = {}
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.num_aborted = 0  # streams that the page aborted
        self.app = FastAPI()
        page_files.install(self.app)
        self.app.middleware("http")(self._note)
        self.app.get("/v1/models")(self._models)
        self.app.get("/metrics")(self._metrics)
        self.app.get("/learning")(lambda: self.learning)
        self.app.post("/v1/chat/completions")(self._chat)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    async def _note(self, request: Request, call_next: Any) -> Response:
        self.paths.append(request.url.path)
        return await call_next(request)

    async def _models(self) -> dict[str, Any]:
        return {"data": [{"id": "scripted-model", "drafter": self.drafter, "max_model_len": 4096}]}

    async def _metrics(self) -> Response:
        return Response(self.metrics, media_type="text/plain")

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body.get("top_p", 1) > 1:
            return JSONResponse({"error": {"message": "top_p must be at most 1"}}, 400)
        text = self.plain_text if self.plain_text is not None and not body["speculate"] else self.text
        return StreamingResponse(self._events(text, body["speculate"]), media_type="text/event-stream")

    async def _events(self, text: str, speculates: bool) -> AsyncIterator[str]:
        def event(data: dict[str, Any]) -> str:
            return "data: " + json.dumps(data) + "\n\n"

        begun, tokens, accepted = time.monotonic(), 0, 0
        try:
            for at in range(0, len(text), self.piece):
                while self.pause_at is not None and at >= self.pause_at:
                    await asyncio.sleep(0.01)
                drafted = speculates and tokens % 3 > 0
                tokens += 1
                accepted += drafted
                live = {"spans": [[text[at : at + self.piece], drafted]], "tokens": tokens}
                live |= {"steps": (tokens - accepted) if speculates else 0, "accepted": accepted}
                delta = {"reasoning": "…"} if self.reasoning else {"content": "…"}
                yield event({"choices": [{"index": 0, "delta": delta, "speculation": live}]})
                await asyncio.sleep(self.delay)
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
            steps = tokens - accepted if speculates else 0
            figures = {"steps": steps, "acceptance_length": tokens / max(steps, 1), "acceptance_by_position": [0.8, 0.5, 0.2]}
            figures |= {"tokens_per_second": tokens / max(time.monotonic() - begun, 1e-3), "time_to_first_token": 0.01}
            yield event({"choices": [], "usage": {"completion_tokens": tokens, "speculation": figures}})
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise

    def __enter__(self) -> ScriptedServer:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.pause_at = None
        self.server.should_exit = True
        self.thread.join(10)
