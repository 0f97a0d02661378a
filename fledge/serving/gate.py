"""What every request passes first: the API key and the limit on its size."""

from __future__ import annotations

import base64
import binascii
import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fledge.serving.errors import ApiError

OPEN_PATHS = ("/health",)


class Gate:
    """The key comes as a bearer token, or as the password of basic authentication, which lets a browser ask for it."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            return await refusal.response()(scope, receive, send)
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.max_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return await self.app(scope, limited, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if self.keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers.get("authorization", "")):
            scheme = 'Basic realm="Fledge: the API key is the password"' if scope["path"] == "/" else "Bearer"
            return ApiError(
                "a valid API key is missing; send it as `Authorization: Bearer KEY`",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": scheme},
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.max_bytes:
            return ApiError(self._too_large(), 413)
        return None

    def _too_large(self) -> str:
        return f"the request is larger than {self.max_bytes} bytes; send less, or start the server with --max-request-bytes"

    def _has_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given).decode(errors="replace").partition(":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        candidate = given.strip().encode(errors="replace")
        return any(secrets.compare_digest(candidate, key) for key in self.keys)
