"""The HTTP routes of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

import fledge
from fledge.serving import chat, completions, errors, page_files, prompts, responses
from fledge.serving.errors import ApiError
from fledge.serving.limits import Limits, check_json
from fledge.serving.metrics import Metrics
from fledge.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, ResponsesRequest, TokenizeRequest
from fledge.serving.request_guard import RequestGuard, caller_of
from fledge.serving.service import LONG_TEXT, Service
from fledge.serving.streaming import unless_disconnected
from fledge.tokenizer import Tokenizer

Result = TypeVar("Result")

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in {
        400: "The request is wrong; the message says what to change.",
        401: "The API key is missing or wrong.",
        404: "No such model.",
        408: "The request did not arrive in time.",
        413: "The request is too large.",
        503: "The server is loading or busy; see Retry-After.",
    }.items()
}


def create_app(service: Service) -> FastAPI:
    flags = service.flags

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        watching = asyncio.create_task(service.engine.watch_event_loop())
        yield
        watching.cancel()
        service.engine.cancel_waiting()
        await service.engine.stop()

    app = App(title="Fledge", version=fledge.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = checked_route(service.limits)
    is_local = flags.host in ("127.0.0.1", "::1", "localhost") and not flags.uds and not flags.trusted_proxies
    app.add_middleware(RequestGuard, keys=flags.api_key, limits=service.limits, local_only=is_local and not flags.api_key)
    if flags.allowed_origins:
        app.add_middleware(  # added last, so outermost: preflight requests carry no key
            CORSMiddleware,
            allow_origins=list(flags.allowed_origins),
            allow_credentials=flags.allow_credentials,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    errors.install(app)
    started = int(time.time())

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(payload: ChatRequest, request: Request) -> Any:
        return await chat.create(service, payload, request)

    @app.post("/v1/completions", responses=ERRORS)
    async def text_completions(payload: CompletionRequest, request: Request) -> Any:
        return await completions.create(service, payload, request)

    @app.post("/v1/responses", responses=ERRORS)
    async def text_responses(payload: ResponsesRequest, request: Request) -> Any:
        return await responses.create(service, payload, request)

    def described(name: str) -> dict[str, Any]:
        info = service.engine.check_ready()
        listed = {"object": "model", "created": started, "owned_by": "fledge", "root": flags.model, "parent": None}
        return {"id": name} | listed | {"max_model_len": info.max_model_len, "drafter": info.drafter}

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Any:
        return {"object": "list", "data": [described(name) for name in flags.names]}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> Any:
        return described(service.check_model(name))

    async def on_long_thread(request: Request, work: Callable[[Tokenizer], Result], length: int) -> Result:
        """Runs `work` on the thread for long texts, so that the prompts of chats and completions do not wait for it."""
        return await unless_disconnected(request, service.tokenize(work, max(length, LONG_TEXT + 1), caller_of(request)))

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(payload: TokenizeRequest, request: Request) -> Any:
        service.check_model(payload.model)
        if payload.messages is not None:
            service.check_chat_limits(payload.messages, payload.tools)

        def work(tokenizer: Tokenizer) -> tuple[list[int], list[str | None] | None]:
            text, special = payload.prompt, payload.add_special_tokens
            if text is None:
                text = prompts.render(service, tokenizer, payload, payload.tools)
            longest = service.limits.max_tokenize_bytes
            if len(text) > longest or len(text.encode()) > longest:
                raise ApiError(f"the text is longer than {longest} bytes; send less (--max-tokenize-bytes)", param="prompt")
            tokens = tokenizer.encode(text, (payload.prompt is not None) if special is None else special)
            return tokens, tokenizer.tokens(tokens) if payload.return_token_strs else None

        length = len(payload.prompt or "")
        if payload.messages is not None:
            length = prompts.length(payload.messages, payload.tools, payload.chat_template_kwargs)
        tokens, texts = await on_long_thread(request, work, length)
        return {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": texts}

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(payload: DetokenizeRequest, request: Request) -> Any:
        service.check_model(payload.model)
        known = service.engine.check_ready().vocab_size
        foreign = next((token for token in payload.tokens if token >= known), None)
        if foreign is not None:
            raise ApiError(f"token {foreign} is outside the vocabulary of {known}", param="tokens")

        def work(tokenizer: Tokenizer) -> str:
            return tokenizer.decode(payload.tokens, skip_special_tokens=False)

        return {"prompt": await on_long_thread(request, work, 4 * len(payload.tokens))}  # about 4 characters a token

    async def health() -> Response:
        """Returns 200 while this process and its engine work, else 503."""
        status = service.engine.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    async def ready() -> Response:
        """Returns 200 if a request would be accepted now, else 503: the server loads, shuts down, or its queue is full."""
        accepting = service.engine.is_accepting
        return JSONResponse({"ready": accepting, "status": service.engine.status}, 200 if accepting else 503)

    for path, answer in (("/health", health), ("/ready", ready)):
        app.get(path, responses={503: {"description": "Not now; the body has the server's state."}})(answer)
        app.head(path, include_in_schema=False)(answer)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        # Until the engine is ready, all figures are zero.
        text = await service.engine.figures() if service.engine.state == "ready" else Metrics(flags.names[0]).render()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/learning", response_class=Response, responses={404: {"description": "The server does not learn."}})
    async def learning() -> Response:
        history = await service.engine.figures(of_learning=True) if service.engine.state == "ready" else b""
        if not history:
            raise ApiError("this server does not learn; start it with --learn", 404)
        return Response(history, media_type="application/json")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": fledge.__version__}

    page_files.install(app)
    return app


class App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI schema without FastAPI's 422: invalid requests get a 400 with OpenAI's error format."""
        schema = super().openapi()
        schema.setdefault("components", {}).setdefault("schemas", {})["Error"] = ERROR_SCHEMA
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema


def checked_route(limits: Limits) -> type[APIRoute]:
    """Returns a route class that checks a body's size and nesting before validation: errors on a huge body take seconds."""

    class CheckedRequest(Request):
        async def json(self) -> Any:
            data = await super().json()
            check_json(data, limits)
            return data

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def checked(request: Request) -> Response:
                return await handle(CheckedRequest(request.scope, request.receive))

            return checked

    return CheckedRoute


_TEXT = {"type": ["string", "null"]}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
        }
    },
}
