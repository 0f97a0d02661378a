"""A real vLLM server as the target in training gives the same states and losses as our own decoder."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from fledge.checkpoints.ends import load_ends, text_config
from fledge.training.journal import read_journal
from fledge.training.recipe import build_recipe
from fledge.training.targets.continuations import continuations
from fledge.training.targets.endpoint import EndpointAnswers, EndpointTarget
from fledge.training.targets.states_client import EndpointError, launch_command
from fledge.training.targets.target import DecoderTarget
from fledge.training.trainer import train
from fledge.training.ttt import TrainBatch
from tests.interop.runs import vllm_python
from tests.interop.tiny_models import save_target, tiny_target

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
TAPS, LAYERS = (1, 2, 3), (1, 2, 3, 4)
START_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_target(tiny_target(), tmp_path_factory.mktemp("endpoint") / "target")


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def url(tmp_path_factory, model, states) -> Iterator[str]:
    """A server started as by `launch_command`, with the CPU version of the connector and small settings."""
    work = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, _, _, *options = shlex.split(launch_command(str(model), LAYERS, states))
    transfer = json.loads(options[-1])
    transfer |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "vllm_cpu_states"}
    command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options[:-1]]
    command += [json.dumps(transfer), "--dtype", "float32", "--enforce-eager", "--max-model-len", "129"]
    command += ["--max-num-seqs", "8", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(Path(__file__).parent)}
    with (work / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=work, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, work / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_for(health: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            if httpx.get(health, timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)


def connect(url: str, model: Path, states: str, taps=TAPS) -> EndpointTarget:
    ends = load_ends(model, torch.float32, torch.device("cpu"))
    return EndpointTarget(url, ends, text_config(model), taps, num_layers=4, storage=states)


def test_states_are_those_of_our_decoder(url, model, states):
    document = torch.tensor([[1] * 40 + [2] * 17 + [3] * 70 + [0], [1] * 90 + [2] * 38])
    tokens = torch.randint(5, 256, document.shape, generator=torch.Generator().manual_seed(0))
    tokens[0, -1] = 0
    positions = torch.cat([torch.arange(n) for n in (40, 17, 70, 1, 90, 38)]).view(2, 128)
    batch = TrainBatch.plan(tokens, positions, document, document > 0, steps=2, multiple=4)
    target = connect(url, model, states)
    target.prefetch(batch)
    theirs, ours = target.states(batch), DecoderTarget(tiny_target(), TAPS).states(batch)
    real = (document > 0).flatten()
    for a, b in zip([theirs.hidden_ND, *theirs.taps], [ours.hidden_ND, *ours.taps], strict=True):
        rms = b[real].square().mean().sqrt()  # a few hundred, because the tiny target's weights are large
        assert (a - b)[real].abs().max() < 1e-4 * rms
    target.close()
    assert not list(Path(states).iterdir())


def test_answers_equal_our_decoder_and_leave_no_files(url, model, states):
    """The first part of `fledge make --endpoint`: the server answers prompts; the states that come with them are deleted."""
    target = connect(url, model, states)
    prompts = [[5, 6, 7, 8], [90, 17, 33], [201, 9, 44, 120, 7]]
    answers = EndpointAnswers(target.client, requests=2)
    stops = [*tiny_target().config.eos_token_ids]
    found = answers.generate(prompts, max_tokens=12, temperature=0.0, top_p=1.0, seed=0, stop_ids=stops)
    assert [ids for _, ids, _ in sorted(found)] == continuations(tiny_target(), prompts, 12, stops)
    sampled = answers.generate(prompts, max_tokens=12, temperature=0.8, top_p=1.0, seed=1, stop_ids=stops)
    assert all(len(ids) == 12 or ids[-1] in stops for _, ids, _ in sampled)
    target.close()
    assert not list(Path(states).iterdir())


def test_other_layers_are_refused(url, model, states):
    with pytest.raises(EndpointError, match="returns 4 states of size 128 per token, but the recipe needs 3"):
        connect(url, model, states, taps=(1, 2))


def test_training_gives_the_same_losses(url, model, states, tmp_path):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(5, 256, (int(n),), generator=generator).tolist() for n in torch.arange(20, 60)]
    answers = [json.dumps({"prompt_ids": text[:8], "answer_ids": text[8:]}) for text in texts]
    (tmp_path / "answers.jsonl").write_text("\n".join(answers) + "\n")
    content = {
        "output": str(tmp_path / "here"),
        "target": {"model": str(model)},
        "data": {
            "train": [str(tmp_path / "answers.jsonl")],
            "held_out_samples": 2,
            "sequence_length": 128,
            "micro_batch_size": 2,
        },
        "drafter": {"aux_layers": list(TAPS), "draft_vocab_size": 128},
        "objective": {"ttt_steps": 3},
        "run": {"steps": 3, "log_every": 1, "evaluate_every": 3, "device": "cpu"},
        "evaluation": {"max_new_tokens": 8, "depths": [2], "select_depth": 2},
    }
    here = build_recipe(content)
    there = replace(here, output=str(tmp_path / "there"), target=replace(here.target, endpoint=url, endpoint_states=states))
    train(here)
    train(there)
    lines = [
        [line for line in read_journal(Path(recipe.output) / "log.jsonl") if line["kind"] == "train"]
        for recipe in (here, there)
    ]
    assert len(lines[1]) == 3
    first, *later = zip(*lines, strict=True)
    assert first[1]["loss"] == pytest.approx(first[0]["loss"], rel=1e-5)
    for a, b in later:  # differences grow with each optimizer step: the target's gradients are in the hundreds
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
    assert not list(Path(states).iterdir())
