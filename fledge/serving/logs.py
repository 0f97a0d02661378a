"""Setup that every process of the server does first: its log, and how it returns memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from typing import TextIO

M_MMAP_THRESHOLD, LARGE_BYTES = -3, 4 << 20  # parameters of glibc's mallopt


def give_back_large_blocks() -> None:
    """Makes glibc return freed blocks of 4 MiB and more to the system. By default glibc keeps parts of them. Logits of a
    large batch are tens of megabytes, so that a server's memory would grow with the largest batch so far."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


class StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which a progress bar replaces so that log lines appear above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def log_to_stderr(level: str) -> None:
    """Logs Fledge's and uvicorn's lines to standard error in one format."""
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    for name in ("fledge", "uvicorn.error", "uvicorn.access"):
        log = logging.getLogger(name)
        log.setLevel({"trace": "DEBUG"}.get(level, level.upper()))
        if not log.handlers:
            log.addHandler(handler)
    if level not in ("debug", "trace"):
        logging.getLogger("uvicorn.error").addFilter(_is_not_startup)


def _is_not_startup(record: logging.LogRecord) -> bool:
    """Drops uvicorn's startup lines: they appear before the model is loaded, and read as if the server were ready."""
    return not str(record.msg).startswith(
        ("Started server process", "Waiting for application startup", "Application startup complete", "Uvicorn running")
    )
