"""For `make test-sanitize`: the sanitizers are active. They check the other tests of the C kernels in the same run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fledge.kernels import native, native_build

pytestmark = pytest.mark.skipif(
    "sanitize" not in os.environ.get(native_build.FLAGS_VARIABLE, ""), reason="for `make test-sanitize`"
)
# With ROWS = 3 the output has one row too few.
OVERRUN = """
import torch
from fledge.kernels import native
x, weight, out = torch.ones(3, 64), torch.ones(64), torch.empty(2, 64)
native.library().quick.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), ROWS, 64, 64, 1e-5)
"""


@pytest.mark.parametrize("rows", [2, 3])
def test_a_buffer_overflow_is_detected(rows: int) -> None:
    assert native.library() is not None
    ran = subprocess.run(
        [sys.executable, "-c", OVERRUN.replace("ROWS", str(rows))], capture_output=True, text=True, timeout=300
    )
    if rows == 2:
        assert ran.returncode == 0, ran.stderr
    else:
        assert "AddressSanitizer: heap-buffer-overflow" in ran.stderr
        assert ran.returncode != 0
