"""Errors in OpenAI's format, `{"error": {"message", "type", "param", "code"}}`, without internal details."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from fledge.errors import UserError, printable

log = logging.getLogger("fledge.serving")

MAX_MESSAGE = 600  # characters; messages quote what clients sent
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An error response. Its message tells the client what is wrong and what to do."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = printable(message, MAX_MESSAGE)
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def overloaded(message: str, retry_after: int) -> ApiError:
    return ApiError(message, 503, code="overloaded", headers={"Retry-After": str(retry_after)})


def internal_error() -> ApiError:
    return ApiError("the server failed to answer; its log says why", 500, code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """Returns the response for an error. A client's mistake keeps its message; anything else is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(str(error))
    log.error("a request failed", exc_info=error)
    return internal_error()


def install(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    @app.exception_handler(UserError)
    async def known(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> JSONResponse:
        return internal_error().response()  # Starlette raises it again, and uvicorn logs it

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _describe(error.errors()[0], error.body).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, UserError):  # raised while the body was read, where FastAPI wraps other errors
            return ApiError(str(error.__cause__)).response()
        reason = {404: f"there is no route {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
        message = reason.get(error.status_code) or str(error.detail) or HTTPStatus(error.status_code).phrase
        return ApiError(message, error.status_code, headers=error.headers).response()


def _describe(error: Mapping[str, Any], body: Any) -> ApiError:
    """Returns the first validation error as a sentence with the field that it is about."""
    if error["type"] == "json_invalid":
        return ApiError("the body is not valid JSON")
    if not isinstance(body, dict):
        return ApiError("the body must be a JSON object, sent as application/json")
    # The path also contains union members that validation tried: only parts found in the body, or missing from it, are fields.
    place: list[str] = []
    at: Any = body
    for part in error["loc"]:
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            at = at[part]
        elif not (error["type"] == "missing" and part == error["loc"][-1]):
            continue
        place.append(str(part))
    field = printable(".".join(place), 100) or None
    message = str(error["msg"]).removeprefix("Value error, ")
    return ApiError(f"{field}: {message}" if field else message, param=field)
