"""Runs the same jobs on real vLLM and on Fledge and returns results in one format (see vllm_conformance.py)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from fledge import LLM, SamplingParams

SCRIPT = Path(__file__).with_name("vllm_conformance.py")


def run_vllm(folder: Path, job: dict) -> dict:
    result = run_all_on_vllm(folder, {"job": job})["job"]
    assert "error" not in result, result["error"]
    return result


def run_all_on_vllm(folder: Path, jobs: dict[str, dict]) -> dict[str, dict]:
    """Runs all jobs in one process. The result of a failed job is its error."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [vllm_python(), str(SCRIPT), str(folder / "jobs.json"), str(folder / "results.json")]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


def vllm_python() -> str:
    python = os.environ.get("FLEDGE_VLLM_PYTHON")
    assert python, "set FLEDGE_VLLM_PYTHON to the Python of a virtual environment with vLLM"
    return python


def run_fledge(job: dict) -> dict:
    """A result in vLLM's format. Counts include tokens of the last step that a stop cuts off, as vLLM's do."""
    fixed_depth = {"adaptive": False, "drift_guard": False, "prefix_caching": False}
    settings = {"depth": job["depth"], "dtype": "float32", "max_model_len": job["max_model_len"], "device": "cpu"}
    llm = LLM(job["target"], job["drafter"], **settings, **fixed_depth)
    engine = llm.engine
    proposed: list[list[int]] = []
    accepted_at, steps = [0] * job["depth"], 0
    draft, collect = engine.drafter.draft, engine.executor.collect

    def noting_drafts(spans, taps):
        drafts = draft(spans, taps)
        proposed.extend(list(one.tokens) for one in drafts)
        return drafts

    def counting():
        nonlocal steps
        outputs = collect()
        for output in outputs:
            if output.passes[0].depth:
                steps += 1
                for position in range(sum(output.drafted)):
                    accepted_at[position] += 1
        return outputs

    engine.drafter.draft, engine.executor.collect = noting_drafts, counting
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=job["ignore_eos"])
    token_ids, proposed_by_prompt = [], []
    for prompt in job["prompts"]:
        proposed.clear()
        token_ids.append(llm.generate([prompt], params)[0].token_ids)
        proposed_by_prompt.append([list(one) for one in proposed])
    return {"token_ids": token_ids, "steps": steps, "accepted_at": accepted_at, "proposed": proposed_by_prompt}
