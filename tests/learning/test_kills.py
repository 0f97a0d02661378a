"""A process killed at any write of a save: a restart finds one complete generation, the old or the new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from fledge.checkpoints.eagle3 import load_drafter
from fledge.learning.generations import Generations, read_history
from fledge.learning.setup import initial_drafter_config
from fledge.models.drafter import EagleDrafter
from fledge.training.targets import toy

KEEP = 1


def saved(folder: Path, number: int) -> None:
    """Saves a generation whose weights all equal its number, and its line in the history."""
    drafter = EagleDrafter(initial_drafter_config(toy.TARGET)).requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.fill_(float(number))
    generations = Generations(folder, KEEP)
    generations.record({"event": "swap", "requests": number})
    generations.save(drafter, number, {"reason": "a test"})


def save_and_die(folder: Path, number: int, last: int) -> None:
    """Saves a generation and kills the process at the `last`-th file operation (open, rename, delete …) in the folder."""
    left = last

    def watch(event: str, arguments: tuple) -> None:
        nonlocal left
        if event.partition(".")[0] in ("open", "os", "shutil", "tempfile") and str(folder) in str(arguments[:2]):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    saved(folder, number)


def test_a_kill_in_a_save_leaves_a_whole_generation(tmp_path):
    script = (
        "import sys; from pathlib import Path; from tests.learning.test_kills import every_kill; every_kill(Path(sys.argv[1]))"
    )
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(folders) > 12
    seen = []
    for folder in folders:
        generations = Generations(folder, KEEP).lock()
        number = generations.current
        seen.append(number)
        drafter = load_drafter(generations.path(number), toy.TARGET)
        assert all(torch.equal(one, torch.full_like(one, number)) for one in drafter.parameters())
        assert generations.figures(number) == {"reason": "a test"}
        assert [event["requests"] for event in read_history(folder)][:3] == [1, 2, 3]
        assert not list(folder.glob(".generation-*"))
        assert generations.newest >= number
        generations.close()
        saved(folder, generations.newest + 1)  # a restart can save again
        assert generations.current == generations.newest
    assert seen == sorted(seen)
    assert set(seen) == {3, 4}  # the old generation until the last step of the save


def every_kill(root: Path) -> None:
    """Forks children that die at the first write, the second and so on, until one survives. Needs a process without threads."""
    torch.set_num_threads(1)
    for last in range(1, 200):
        folder = root / str(last)
        for number in (1, 2, 3):
            saved(folder, number)
        if not (child := os.fork()):
            save_and_die(folder, 4, last)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("no child survived its save")
