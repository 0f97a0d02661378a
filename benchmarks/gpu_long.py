"""Measures 128K tokens of context on the captured engine, for `gpu.py`."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from gpu_kernels import DEVICE, event_time
from gpu_loop import force_depth

from fledge.config import RopeConfig
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import DEVICE_PAGE_SIZE, EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.batch_state import GREEDY
from fledge.engine.memory import memory_plan
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams

LONGEST = 131072
CONTEXTS = (1024, 8192, 32768, LONGEST)
ANSWER = 64
DEPTH = 3


def stretched(network: Decoder | EagleDrafter, kind: type) -> Decoder | EagleDrafter:
    """A network of the same shape with random weights, and YaRN that extends its trained length to LONGEST."""
    config = network.config
    trained = config.max_positions
    rope = RopeConfig(theta=config.rope.theta, kind="yarn", factor=LONGEST / trained, original_max_positions=trained)
    with torch.device(DEVICE):
        made = kind(replace(config, max_positions=LONGEST, rope=rope))
    return randomised(made.to(torch.bfloat16))


def randomised(network: Decoder | EagleDrafter) -> Decoder | EagleDrafter:
    """Fills the network with small random weights, and norms with ones."""
    generator = torch.Generator(network.norm.weight.device).manual_seed(0)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
        else:
            parameter.data.fill_(1.0)
    return network.eval().requires_grad_(False)


@torch.inference_mode()
def long_context(decoder: Decoder, drafter: EagleDrafter | None) -> dict[str, object]:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    target = stretched(decoder, Decoder)
    draft = stretched(drafter, EagleDrafter) if drafter is not None else None
    if draft is not None and drafter is not None:
        draft.d2t.copy_(drafter.d2t)
    config = EngineConfig(
        device=DEVICE, dtype="bfloat16", page_size=DEVICE_PAGE_SIZE, max_num_seqs=1, max_model_len=LONGEST, prefix_caching=False
    )
    engine = build_engine(target, Speculation(draft, DEPTH), replace(config, kv_cache_tokens=LONGEST + 2 * DEVICE_PAGE_SIZE))
    plan = memory_plan(engine)
    held = torch.cuda.memory_allocated() - before
    found: dict[str, object] = {
        "formula_bytes": plan.total,
        "allocated_bytes": held,
        "allocated_over_formula": held / plan.total,
        "formula": plan.describe(),
    }
    torch.cuda.reset_peak_memory_stats()
    for context in CONTEXTS:
        found[f"{context} tokens"] = one_context(engine, context, DEPTH if draft is not None else 0)
    found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def one_context(engine: Engine, context: int, depth: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(context)
    length = context - ANSWER - (depth + 1) * 24
    prompt = torch.randint(0, engine.model.vocab_size, (length,), generator=generator).tolist()
    force_depth(engine, depth)
    graphs, reach = engine.executor.batch.graphs, engine.executor.batch.kv_bucket(context)
    params = SamplingParams(max_tokens=ANSWER + (depth + 1) * 24, temperature=0, ignore_eos=True)
    # The first run captures graphs and compiles kernels; the second one counts.
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        request = engine.add_request(prompt, params)
        while request.num_answer < ANSWER and not request.finished:
            engine.step()
        lasted = time.perf_counter() - request.first_token_time
        said, prompt_seconds = request.num_answer - 1, request.first_token_time - started
        cycle = event_time(lambda: graphs.run(1, depth, GREEDY, *reach), 10)
        plain = event_time(lambda: graphs.run(1, 0, GREEDY, *reach), 10)
        engine.abort(request)
        while engine.has_unfinished():
            engine.step()
    return {
        "prompt_seconds": prompt_seconds,
        "prompt_tokens_per_s": length / prompt_seconds,
        "ms_per_token": 1e3 * lasted / said,
        "cycle_us": cycle,
        "plain_step_us": plain,
        "acceptance_length": request.stats.acceptance_length,
    }
