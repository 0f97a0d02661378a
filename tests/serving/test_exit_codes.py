"""Exit codes of a server that is ended while its model is loaded."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

# Loads for ever, in torch's C++ code: Python's end used to abort the process there.
SCRIPT = """
import sys, torch
import fledge.serving.build
from fledge.cli.main import main

def load(flags, metrics):
    print("the weights are read", file=sys.stderr, flush=True)
    while True:
        torch.ones(1 << 16).sum()

fledge.serving.build.build = load
sys.argv = ["fledge", "serve", "smollm2-135m", "--no-engine-process", "--api-workers", "1", "--uds", sys.argv[1],
            "--uvicorn-log-level", "debug"]
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_ended_while_loading(number, code, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "socket")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        try:
            said = ""
            assert process.stderr is not None
            # Two threads write: their words may come on one line.
            while not ("the weights are read" in said and "Application startup complete." in said):
                said += (line := process.stderr.readline())
                assert line, said
            process.send_signal(number)
            _, rest = process.communicate(timeout=60)
        finally:
            timer.cancel()
            process.kill()
    assert process.returncode == code, rest
    assert "terminate called" not in rest
