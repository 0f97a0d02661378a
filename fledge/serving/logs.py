"""What every process of the server does first: where its log goes, and how it gives memory back."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from typing import TextIO

M_MMAP_THRESHOLD, LARGE_BYTES = -3, 4 << 20  # glibc's mallopt


def give_back_large_blocks() -> None:
    """Logits of a large batch are tens of megabytes. Left alone, glibc comes to keep such blocks, in parts, once they were
    freed, and a server's memory grows with the largest batch so far."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


class StderrHandler(logging.StreamHandler):
    """Writes to what standard error is at the time: while a progress bar is shown, lines go above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def log_to_stderr(level: str) -> None:
    """One format for our lines and uvicorn's."""
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    for name in ("fledge", "uvicorn.error", "uvicorn.access"):
        log = logging.getLogger(name)
        log.setLevel({"trace": "DEBUG"}.get(level, level.upper()))
        if not log.handlers:
            log.addHandler(handler)
    if level not in ("debug", "trace"):
        logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Drops uvicorn's lines on its start: they come before the model is loaded, and read as if it were."""
    return not str(record.msg).startswith(
        ("Started server process", "Waiting for application startup", "Application startup complete", "Uvicorn running")
    )
