"""The page at `/`: a fixed set of files, with headers that restrict it to this server."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page shows text that a model wrote. Even if some of it were parsed as HTML, no script in it would run: only this server's
# files may run, and trusted types forbid innerHTML and similar calls in the page's own code.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def contents() -> dict[str, bytes]:
    """Returns the files by name. Nothing else is served, so no path in a request reaches the file system."""
    return {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}


def _response(name: str) -> Response:
    content = contents().get(name)
    if content is None:
        raise HTTPException(404, f"the page has no file {name[:64]!r}")
    return Response(content, headers=HEADERS | {"Content-Type": MEDIA_TYPES[Path(name).suffix]})


def install(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _response("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return _response(name)
