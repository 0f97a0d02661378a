"""A helper process: reads pieces of work from standard input, writes what came of them to standard output."""

from __future__ import annotations

import os
import pickle
import sys

from fledge.errors import UserError


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    work = None
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
            os._exit(0)  # at once: there is nobody to tell


if __name__ == "__main__":
    main()
