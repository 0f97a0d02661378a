"""Messages and exit codes of a server that cannot start, and of one that is stopped while it loads its model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest

from fledge.errors import UserError
from fledge.serving import flags
from fledge.serving.defaults import generation_defaults, overriding_defaults
from fledge.serving.server import check_files
from fledge.serving.service import Service

# Loads for ever in torch's C++ code. Ending Python there used to abort the process.
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
def test_a_signal_while_loading(number, code, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "socket")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        try:
            said = ""
            assert process.stderr is not None
            # Two threads write, so both messages may be on one line.
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


BROKEN_UVICORN = """
import uvicorn
def broken(self):
    raise OSError("no such thing")
uvicorn.Config.load = broken
"""


def test_a_failed_start_during_loading_exits_with_1(tmp_path):
    command = [sys.executable, "-c", BROKEN_UVICORN + SCRIPT, str(tmp_path / "socket")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "no such thing" in ended.stderr


def test_files_are_checked_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").write_text("x")
    wrong = {
        ("--uds", str(tmp_path / "nowhere" / "socket")): "not a writable folder",
        ("--uds", str(tmp_path / "file")): "not a socket",
        ("--uds", str(tmp_path / ("s" * 120))): "bytes",
        ("--ssl-certfile", str(tmp_path / "file")): "certificate",
        ("--ssl-keyfile", str(tmp_path / "file")): "--ssl-certfile",
        ("--ssl-certfile", str(tmp_path / "missing"), "--ssl-keyfile", str(tmp_path / "file")): "certificate",
    }
    for words, reason in wrong.items():
        with pytest.raises(UserError, match=reason):
            check_files(flags.parse([str(tmp_path), *words]))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('{"temperature": "warm"}', "temperature is 'warm', but temperature must be a number"),
        ('{"top_p": 7}', "top_p must lie"),
        ('{"top_k": 1.5}', "top_k must be a whole number"),
        ('{"max_new_tokens": 0}', "max_new_tokens is 0, but max_tokens must be at least 1"),
        ('{"repetition_penalty": true}', "repetition_penalty"),
    ],
)
def test_sampling_defaults_are_validated_at_startup(tmp_path, given, reason):
    (tmp_path / "generation_config.json").write_text(given)
    with pytest.raises(UserError, match=rf"generation_config\.json: .*{reason}"):
        generation_defaults(tmp_path)
    with pytest.raises(UserError, match=f"--override-generation-config: .*{reason}"):
        overriding_defaults(json.loads(given))


def test_sampling_defaults(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 50.0, "temperature": 0.5, "eos_token_id": 2, "top_p": null}')
    assert generation_defaults(tmp_path) == {"top_k": 50, "temperature": 0.5}
    with pytest.raises(UserError, match="'top_q' is not a sampling parameter"):
        overriding_defaults({"top_q": 1})
    with pytest.raises(UserError, match="top_p"):
        Service(flags.parse([str(tmp_path), "--no-engine-process", "--override-generation-config", '{"top_p": 7}']))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        generation_defaults(tmp_path)
