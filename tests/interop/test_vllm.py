"""Our drafters on real vLLM: same tokens, same drafts, same accepted counts per position."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from fledge import SamplingParams, sources
from fledge.bench.prompts import DEMO
from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.export import plain_folder
from fledge.checkpoints.speculators import save_speculators
from fledge.drafters import default_drafter
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.tokenizer import Tokenizer
from tests.interop.runs import run_all_on_vllm, run_fledge
from tests.interop.tiny_models import save_target
from tests.interop.trained import texts, trained_drafter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]  # the first test includes the whole vLLM run
DEPTH = 4
STEPS = 60
TINY = {
    "eagle 3": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "fc_norm only": {"fc_norm": True},
    "norm_output only": {"norm_output": True},
    "four taps": {"fc_norm": True, "norm_output": True, "aux_layer_ids": (0, 2, 5, 8)},
    "norms before fc and residual": {"norm_before_fc": True, "norm_before_residual": True},
    "draft vocabulary": {"fc_norm": True, "norm_output": True, "draft_vocab_size": 56},
    "own embedding, narrower, two layers": {"hidden_size": 32, "own_embedding": True, "num_layers": 2, "head_dim": 32},
    "window": {"norm_output": True, "window": 8},
    "norms on queries and keys, window": {"fc_norm": True, "norm_output": True, "qk_norm": True, "window": 8},
}
SPECULATORS = ("eagle 3.1", "four taps")
SHIPPED = [name for name in sources.BUILT_INS if default_drafter(name) is not None]


def assert_same(ours: dict, vllm: dict) -> None:
    assert ours["token_ids"] == vllm["token_ids"]
    for mine, theirs in zip(ours["proposed"], vllm["proposed"], strict=True):
        # vLLM makes one more, unused draft after the last token.
        assert mine == theirs[: len(mine)]
        assert len(theirs) - len(mine) in (0, 1)
    assert ours["steps"] == vllm["steps"]
    assert ours["accepted_at"] == vllm["accepted_at"]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory, target) -> Path:
    return save_target(target, tmp_path_factory.mktemp("target"))


def tiny_job(target_folder: Path, drafter_folder: Path) -> dict:
    generator = torch.Generator().manual_seed(21)
    prompts = [text[: 5 + 3 * i].tolist() for i, text in enumerate(texts(6, generator, noise=0.1))]
    return {
        "target": str(target_folder),
        "drafter": str(drafter_folder),
        "prompts": prompts,
        "max_tokens": 40,
        "depth": DEPTH,
        "max_model_len": 128,
        "ignore_eos": True,
    }


def imperfect(drafter: EagleDrafter, target: Decoder) -> EagleDrafter:
    """Adds noise to the drafter until some drafts are accepted in full, some in part and some not at all."""
    generator = torch.Generator().manual_seed(22)
    prompts = [text[:8].tolist() for text in texts(6, generator, noise=0.1)]
    for _ in range(20):
        speculation = Speculation(copy.deepcopy(drafter), DEPTH).fixed_depth()
        engine = build_engine(target, speculation, EngineConfig(dtype="float32", device="cpu"))
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
        if engine.stats.unconditional_rates[0] < 0.9:
            return drafter
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.2 * float(parameter.std()) if parameter.dim() > 1 else 0.02)
    raise AssertionError("noise does not harm this drafter")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, target, target_folder) -> dict[str, dict]:
    work = tmp_path_factory.mktemp("drafters")
    jobs = {}
    for number, (name, settings) in enumerate(TINY.items()):
        drafter = imperfect(trained_drafter(target, steps=STEPS, **settings), target)
        jobs[name] = tiny_job(target_folder, save_drafter(drafter, work / f"{number}"))
        if name in SPECULATORS:
            folder = save_speculators(drafter, work / f"{number}-speculators", str(target_folder))
            jobs[f"{name}, speculators layout"] = tiny_job(target_folder, folder)
    for name in SHIPPED:
        folder = sources.resolve(name)
        tokenizer = Tokenizer(folder)
        chats = [[{"role": "user", "content": prompt.text}] for prompt in DEMO[::2]]
        jobs[name] = {
            "target": str(folder),
            "drafter": str(plain_folder(default_drafter(name))),
            "prompts": [tokenizer.apply_chat_template(chat) for chat in chats],
            "max_tokens": 40,
            "depth": 5,
            "max_model_len": 512,
            "ignore_eos": True,
        }
    return jobs


@pytest.fixture(scope="module")
def results(tmp_path_factory, jobs) -> dict[str, dict]:
    return run_all_on_vllm(tmp_path_factory.mktemp("vllm"), jobs)


@pytest.mark.parametrize("name", [*TINY, *(f"{name}, speculators layout" for name in SPECULATORS), *SHIPPED])
def test_same_text_drafts_and_counts(jobs, results, name):
    ours = run_fledge(jobs[name])
    assert 0 < ours["accepted_at"][0] < ours["steps"], "the drafter is too good or too bad for a useful comparison"
    assert "error" not in results[name], results[name]["error"]
    assert_same(ours, results[name])
