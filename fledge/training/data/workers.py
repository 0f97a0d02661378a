"""Runs work on the host: in this thread, or in processes beside the one that drives the GPU.

    driving thread | submit …                       (never waits)
    worker thread  |   write ==> process ==> read   (one thread for each process; it waits, and takes no time)

A process is a fresh interpreter on two pipes: it knows nothing of CUDA, runs no main module again, is not reached by a
Ctrl-C, and ends by itself when this process does, however that ends.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader
from typing import Any

from fledge.errors import UserError


class WorkerError(UserError):
    """A worker process that died, or that met something it cannot do."""


class Here:
    """Runs the work in this thread: for few prompts, or when generating takes far longer than the work."""

    batch = 1  # how many pieces are worth handing over at once
    ahead = 1  # how many prompts to prepare before they are asked for

    def __init__(self, work: object) -> None:
        self._work = work

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Runs a function that does its share of work by `call`."""
        done: Future = Future()
        done.set_result(function(*arguments))
        return done

    def call(self, method: str, pieces: Any) -> Any:
        """A method of the work; only from a submitted function."""
        return getattr(self._work, method)(pieces)

    def close(self) -> None:
        pass


class Processes:
    """`work`: any object that can be pickled. Each process has its own, and each thread its process: what one call leaves
    in it, the next of the same submitted function finds."""

    batch = 32

    def __init__(self, work: object, count: int, ahead: int) -> None:
        self.ahead = ahead
        self._set_up = pickle.dumps(work)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._mine = threading.local()
        self._started: list[subprocess.Popen] = []
        self._closed = False

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        return self._threads.submit(function, *arguments)

    def call(self, method: str, pieces: Any) -> Any:
        if not hasattr(self._mine, "process"):
            process = self._start()
            self._exchange(process, self._set_up)
            self._mine.process = process
        return self._exchange(self._mine.process, pickle.dumps((method, pieces)))

    def _start(self) -> subprocess.Popen:
        if self._closed:
            raise WorkerError("stopped")
        quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
        # The same modules as here, wherever they were found; and no GPU.
        environment = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fledge.training.data.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self._started.append(process)
        return process

    @staticmethod
    def _exchange(process: subprocess.Popen, message: bytes) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(message)
            process.stdin.flush()
            problem, result = pickle.load(process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            process.kill()
            raise WorkerError(
                f"a worker process ended unexpectedly (exit status {process.wait()}; killed for want of memory?); "
                "the same command goes on from what is finished"
            ) from None
        if isinstance(problem, UserError):  # the user's mistake, whoever noticed it
            raise problem
        if problem:
            raise WorkerError(f"a worker process failed: {problem}")
        return result

    def close(self) -> None:
        """Processes hold nothing that is not here as well: they can be ended at any time."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._started:
            process.kill()
        self._threads.shutdown(wait=True)
        for process in self._started:
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(OSError):  # what could not be flushed is of no use any more
                    pipe.close()


Workers = Here | Processes


def find_workers(work: object, num_prompts: int, concurrency: int, processes: int | None) -> Workers:
    """`processes`: None lets the amount of work decide."""
    if processes is None:
        # A thousand prompts are half a second of work, and starting a process takes seconds. A generator that answers
        # few at once (on a CPU) has use for every core itself.
        worth_it = num_prompts >= 1000 and concurrency >= 256
        # 300,000 tokens/s are about 1,000 answers/s, and one process settles about as many.
        processes = min(4, max(1, num_cores() - 1)) if worth_it else 0
    return Processes(work, processes, ahead=2 * max(concurrency, 64)) if processes else Here(work)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    assert isinstance(requests, BufferedReader)
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    work: Any = None
    while True:
        if not requests.peek(1):  # the other side is gone
            return
        problem: UserError | str = ""
        result = None
        try:
            if work is None:
                work = pickle.load(requests)
            else:
                method, pieces = pickle.load(requests)
                result = getattr(work, method)(pieces)
        except UserError as error:
            problem = error
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        reply = pickle.dumps((problem, result), pickle.HIGHEST_PROTOCOL)
        try:
            replies.write(reply)
            replies.flush()
        except BrokenPipeError:
            os._exit(0)  # at once: no process waits for a result


if __name__ == "__main__":
    main()
