"""Returning unused memory to the operating system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fledge.engine.memory import MAPPINGS

SCRIPT = """
import torch
from fledge.engine.memory import give_back_code, give_back_heap

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssFile")).split()[1])

x = torch.randn(64, 64)
expected, before = x @ x, resident()
give_back_code()
after = resident()
give_back_heap()
assert torch.equal(x @ x, expected)
print(before, after)
"""


@pytest.mark.skipif(not MAPPINGS.exists(), reason="needs Linux")
def test_code_pages_are_released_and_loaded_again():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 2
