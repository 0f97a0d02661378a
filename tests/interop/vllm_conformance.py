"""Runs real vLLM on a CPU with one drafter after the other and writes results as JSON. Start it with a Python that has vLLM:

    python vllm_conformance.py JOBS.json RESULTS.json

JOBS and RESULTS: {name: JOB} and {name: RESULT}. One process runs all jobs: importing vLLM takes longer than a tiny model.
JOB: {"target", "drafter" (null: plain), "prompts": [[token ids]], "max_tokens", "depth", "max_model_len", "ignore_eos"}
RESULT: {"token_ids": [[…]], "steps", "accepted_at": [per position], "proposed": [[first draft, second draft, …] per prompt],
         "version"}, or {"error"}
Prompts run one after the other, so that each draft belongs to a known prompt. Counts include tokens of the last step that
a stop cuts off, as vLLM counts them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process, so that drafts can be recorded
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(jobs_file: str, results_file: str) -> None:
    results = {}
    for name, job in json.loads(Path(jobs_file).read_text()).items():
        try:
            results[name] = run(job)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    Path(results_file).write_text(json.dumps(results))


def run(job: dict) -> dict:
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    speculative = None
    if job["drafter"] is not None:
        speculative = {"model": job["drafter"], "method": "eagle3", "num_speculative_tokens": job["depth"]}
    llm = LLM(
        model=job["target"],
        speculative_config=speculative,
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=4,
        max_num_batched_tokens=job["max_model_len"],
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    proposed: list[list[int]] = []
    watch_drafts(llm, proposed)
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=job["ignore_eos"], detokenize=False)
    token_ids, proposed_by_prompt = [], []
    for prompt in job["prompts"]:
        proposed.clear()
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        token_ids.append(list(output.outputs[0].token_ids))
        proposed_by_prompt.append([list(draft) for draft in proposed])
    counters = {metric.name: getattr(metric, "values", getattr(metric, "value", None)) for metric in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return {
        "version": vllm.__version__,
        "token_ids": token_ids,
        "steps": counters.get("vllm:spec_decode_num_drafts", 0),
        "accepted_at": counters.get("vllm:spec_decode_num_accepted_tokens_per_pos", []),
        "proposed": proposed_by_prompt,
    }


def watch_drafts(llm, proposed: list[list[int]]) -> None:
    """Records every draft that the model runner passes to the scheduler."""
    core = llm.llm_engine.engine_core.engine_core
    update = core.scheduler.update_draft_token_ids

    def noting(draft_token_ids) -> None:
        proposed.extend(list(map(int, draft)) for draft in draft_token_ids.draft_token_ids if len(draft))
        update(draft_token_ids)

    core.scheduler.update_draft_token_ids = noting


if __name__ == "__main__":
    main(*sys.argv[1:])
