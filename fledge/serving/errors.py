"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`, and nothing of our insides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from fledge.errors import UserError

log = logging.getLogger("fledge.serving")

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}


class ApiError(Exception):
    """What a caller is told. Messages name what is wrong and what to do."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
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
    """A mistake of the caller's keeps its words; anything else is logged here and stays here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(str(error))
    log.error("a request failed", exc_info=error)
    return internal_error()


def install(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    @app.exception_handler(UserError)
    @app.exception_handler(Exception)
    async def known(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return ApiError(**_describe(error.errors()[0])).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        reason = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not possible on {request.url.path}"}
        message = reason.get(error.status_code) or str(error.detail) or HTTPStatus(error.status_code).phrase
        return ApiError(message, error.status_code, headers=error.headers).response()


def _describe(error: Mapping[str, object]) -> dict[str, str | None]:
    """The first complaint of the validation, as a sentence and the field it is about."""
    place = [str(part) for part in error["loc"] if part != "body"]
    if error["type"] == "json_invalid":
        return {"message": "the body is not valid JSON", "param": None}
    # The path ends with the names of the union's members that were tried: only plain names are fields.
    field = ".".join(part for part in place if part.replace("_", "").isalnum()) or None
    message = str(error["msg"]).removeprefix("Value error, ")
    return {"message": f"{field}: {message}" if field else message, "param": field}
