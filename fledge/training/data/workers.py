"""Runs work on the host: in this thread, or in worker processes beside the one that drives the GPU.

    main thread    | submit …                       (never waits)
    worker thread  |   write ==> process ==> read   (one thread per process; it only waits)

A worker process is a new interpreter connected by two pipes. It does not use CUDA, does not run the main module again, does
not receive Ctrl-C, and exits when this process ends for any reason.
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
    """Raised if a worker process died or failed."""


class Here:
    """Runs the work in this thread: for few prompts, or if generation takes far longer than the work."""

    batch = 1  # how many pieces to pass per call
    ahead = 1  # how many prompts to prepare in advance

    def __init__(self, work: object) -> None:
        self._work = work

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Runs a function, which may use `call`."""
        done: Future = Future()
        done.set_result(function(*arguments))
        return done

    def call(self, method: str, pieces: Any) -> Any:
        """Calls a method of the work object. Only submitted functions may use it."""
        return getattr(self._work, method)(pieces)

    def close(self) -> None:
        pass


class Processes:
    """Runs the work in processes. `work`: any object that can be pickled; each process has its own copy. Each thread has its
    own process, so state that one call leaves in `work` is there for the next call of the same submitted function."""

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
        # The worker imports the same modules as this process, and sees no GPU.
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
                f"a worker process ended unexpectedly (exit status {process.wait()}; out of memory?); "
                "run the same command again to continue from what is finished"
            ) from None
        if isinstance(problem, UserError):  # keep it a UserError of this process
            raise problem
        if problem:
            raise WorkerError(f"a worker process failed: {problem}")
        return result

    def close(self) -> None:
        """Kills the processes; they hold no state that is not in this process as well."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._started:
            process.kill()
        self._threads.shutdown(wait=True)
        for process in self._started:
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(OSError):  # unflushed data is no longer needed
                    pipe.close()


Workers = Here | Processes


def find_workers(work: object, num_prompts: int, concurrency: int, processes: int | None) -> Workers:
    """Returns where to run the work. `processes`: number of worker processes; None: decided by the amount of work."""
    if processes is None:
        # A thousand prompts are half a second of work, and starting a process takes seconds. A generator with a low
        # concurrency (on a CPU) needs all cores itself.
        worth_it = num_prompts >= 1000 and concurrency >= 256
        # 300,000 tokens/s are about 1,000 answers/s, and one process handles about as many.
        processes = min(4, max(1, num_cores() - 1)) if worth_it else 0
    return Processes(work, processes, ahead=2 * max(concurrency, 64)) if processes else Here(work)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    assert isinstance(requests, BufferedReader)
    os.dup2(2, 1)  # libraries that print to stdout must not corrupt the replies
    work: Any = None
    while True:
        if not requests.peek(1):  # the parent process has ended
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
            os._exit(0)  # the parent process has ended: the result is not needed


if __name__ == "__main__":
    main()
