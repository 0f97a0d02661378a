"""Checks each request first: its API key, its host name, its size, and the time to send it and to read the answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fledge.serving.errors import ApiError
from fledge.serving.limits import Limits

OPEN_PATHS = ("/health", "/ready")
CALLER = "fledge.caller"
CUT = "fledge.cut"  # in the scope: closes the connection and drops unsent data


class CallerTooSlow(Exception):
    """Raised when a client does not read its answer in time: the connection is aborted."""


def caller_of(request: Request) -> str:
    """Returns the client that a request counts for in the queues: its key or its address."""
    return request.scope.get(CALLER, "")


def _client_of(host: str) -> str:
    """Returns the client of an address. With IPv6 it is the /64, because one subscriber has at least a /64 to choose from."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def is_local_name(host: str) -> bool:
    """Whether a Host header cannot be an internet domain: it is an address, `localhost`, or a name without a dot."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return "." not in name.rstrip(".") or name.rstrip(".").lower().endswith(".localhost")


class RequestGuard:
    """The middleware that checks requests. The API key is a bearer token, or the password of basic authentication, for which a
    browser can prompt.

    `local_only`: refuses requests whose Host is a domain. Otherwise a website whose domain is pointed to this machine (DNS
    rebinding) could use a server that listens on this machine only.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], limits: Limits, local_only: bool = False) -> None:
        self.app, self.limits, self.local_only = app, limits, local_only
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        key = self._key(headers.get("authorization", "")) if self.keys else None
        refusal = self._refusal(scope, headers, key)
        if refusal is not None:
            return await refusal.response()(scope, receive, send)
        # With a single key, clients are told apart by address.
        client = scope.get("client")
        scope[CALLER] = f"key {key}" if key is not None and len(self.keys) > 1 else _client_of(client[0]) if client else ""
        taken, whole = 0, False
        deadline = asyncio.get_running_loop().time() + self.limits.body_timeout

        async def limited() -> Message:
            nonlocal taken, whole
            if whole:  # the next message is the disconnect, which may come as late as the answer's end
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self.limits.body_timeout:g} s") from None
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > self.limits.max_request_bytes:
                raise HTTPException(413, self._too_large())
            return message

        async def in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self.limits.write_timeout):
                    await send(message)
            except TimeoutError:
                raise CallerTooSlow from None

        try:
            return await self.app(scope, limited, in_time)
        except CallerTooSlow:
            if CUT in scope:  # a normal close would wait for the client to read
                scope[CUT]()
            return None

    def _refusal(self, scope: Scope, headers: Headers, key: int | None) -> ApiError | None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # uvicorn puts --root-path in front of each path
        if self.keys and path not in OPEN_PATHS and key is None:
            scheme = 'Basic realm="Fledge: the API key is the password"' if path == "/" else "Bearer"
            return ApiError(
                "a valid API key is missing; send it as `Authorization: Bearer KEY`",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": scheme},
            )
        if self.local_only and not is_local_name(headers.get("host", "")):
            return ApiError(
                "this server listens on its own machine only and refuses requests for a domain; use localhost or an address, "
                "or start it with --api-key, or with --trusted-proxies behind a proxy",
                403,
                code="unknown_host",
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self.limits.max_request_bytes):
            return ApiError(self._too_large(), 413)
        return None

    def _too_large(self) -> str:
        longest = self.limits.max_request_bytes
        return f"the request is larger than {longest} bytes; send less, or start the server with --max-request-bytes"

    def _key(self, authorization: str) -> int | None:
        """Returns the index of the API key that was given; None: none that is valid."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given).decode(errors="replace").partition(":")[2]
            except (binascii.Error, ValueError):
                return None
        elif scheme.lower() != "bearer":
            return None
        candidate = given.strip().encode(errors="replace")
        matches = [secrets.compare_digest(candidate, key) for key in self.keys]  # all: constant time
        return matches.index(True) if any(matches) else None
