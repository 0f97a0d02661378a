"""A drafter from `fledge make`, exported and served by real vLLM: it loads strictly and drafts the same as in Fledge."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.export import export_drafter
from fledge.checkpoints.hf import load_config
from fledge.training.make import make
from fledge.training.targets import toy
from tests.interop.runs import run_fledge, run_vllm
from tests.interop.test_vllm import assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's CPU attention does not support heads of 16.
        patch.setattr(toy, "TARGET", replace(toy.TARGET, num_heads=2, num_kv_heads=1, head_dim=32))
        made = make("toy", folder / "out", hours=0.02, device="cpu", log=lambda text: None)
    assert made is not None
    target = folder / "out" / "toy" / "target"
    exported = export_drafter(made.folder, "vllm", folder / "exported", str(target))
    draw = random.Random(3)
    return {
        "target": str(target),
        "drafter": str(exported),
        "prompts": [toy.conversation(draw)[0] for _ in range(6)],
        "max_tokens": 32,
        "depth": 3,
        "max_model_len": 128,
        "ignore_eos": True,
    }


def test_drafter_loads_strictly_in_fledge(job):
    drafter = load_drafter(job["drafter"], load_config(Path(job["target"])))
    assert drafter.config.version == "3.1"


def test_vllm_drafts_the_same_as_fledge(tmp_path, job):
    ours = run_fledge(job)
    assert ours["accepted_at"][0] > 0
    assert_same(ours, run_vllm(tmp_path, job))
