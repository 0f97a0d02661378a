"""Progress on standard error: bars on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
import time

import pytest

from fledge import progress


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


def test_rate_and_remaining_time(clock):
    task = progress.task("answering", 500, "prompts", done=100)
    clock.now += 20
    task.update(140)
    assert task.state() == "140 of 500 prompts, 2.0/s, 3:00 left"
    clock.now += 20
    assert task.state() == "140 of 500 prompts, 1.0/s, 6:00 left"
    assert progress.task("x", 3).state() == "0 of 3"


def test_bytes_and_seconds_have_their_own_format(clock):
    task = progress.task("fetching", 92_000_000, "bytes")
    clock.now += 2
    task.update(46_000_000)
    assert task.state() == "46.0 of 92.0 MB, 23.0 MB/s, 0:02 left"
    task = progress.task("training", 7200, "seconds")
    task.update(600)
    assert task.state() == "10:00 of 2:00:00, 1:50:00 left"


def test_slow_rates_are_per_minute_or_hour(clock):
    task = progress.task("trials", 10)
    clock.now += 60
    task.update(3)
    assert ", 3.0/min, " in task.state()
    clock.now += 3540
    assert ", 3.0/h, " in task.state()


def test_new_total_restarts_the_rate(clock):
    task = progress.task("reading", unit="prompts")
    assert task.state() == "0:00"
    clock.now += 30
    task.show("the target answers", 0, 10)
    clock.now += 5
    task.show("the target answers", 5, 10)
    assert task.line() == "the target answers: 5 of 10 prompts, 1.0/s, 0:05 left"


def test_plain_lines_become_rarer(clock, capsys):
    with progress.task("answering", 1000, "prompts") as task:
        for second in range(1, 201):
            clock.now += 1
            task.update(second, note="loss 1.0")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "fledge: answering: 10 of 1,000 prompts, 1.0/s, 16:30 left; loss 1.0"
    assert [line.split()[2] for line in lines] == ["10", "30", "70", "130", "190"]


def test_short_task_prints_nothing(capsys):
    assert list(progress.track([1, 2, 3], "loading", "tensors")) == [1, 2, 3]
    assert capsys.readouterr() == ("", "")


SCRIPT = """
import time
from fledge import progress
with progress.task("answering [bold]", 20, "prompts") as task:
    for number in range(20):
        time.sleep(0.05)
        task.advance()
        if number == 10:
            print("an answer")
with progress.task("thinking"):
    time.sleep(0.3)
"""


def test_a_terminal_shows_a_bar_and_standard_output_stays_clean():
    parent, child = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=child, env=env) as ran:
        os.close(child)
        said = b""
        with contextlib.suppress(OSError):  # raised at the end of the output
            while part := os.read(parent, 1 << 16):  # read continuously: the terminal's buffer is limited
                said += part
        output = ran.stdout.read()
    os.close(parent)
    shown = said.decode()
    assert ran.returncode == 0
    assert output == b"an answer\n"
    assert "answering [bold]" in shown
    assert " of 20 prompts, " in shown
    assert "/s, 0:0" in shown
    assert "━" in shown
    assert "thinking" in shown


def test_a_narrow_terminal_keeps_the_figures(clock, monkeypatch):
    from rich.console import Console

    task = progress.task("a description that is much longer than the room that there is", 1000, "prompts")
    clock.now += 10
    task.update(100)
    display = progress._Display()
    display._console = Console(width=60, file=io.StringIO(), record=True)
    display.tasks = [task]
    display._console.print(display.render())
    shown = display._console.export_text().splitlines()
    assert len(shown) == 1
    assert shown[0].rstrip().endswith("100 of 1,000 prompts, 10.0/s, 1:30 left")
