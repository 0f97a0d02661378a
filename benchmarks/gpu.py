"""The engine on a GPU: is it right, how fast is it, and where do the microseconds go.

    python benchmarks/gpu.py --model FOLDER --drafter FOLDER --prompts humaneval.jsonl --json results.json

Stages (`--stages checks,linears,plain,spec,offline,profile`), each measured warm, as medians of `--rounds`:
  checks   captured steps equal the same steps run eagerly; answers are the plain network's, and speculative ones the plain
           ones, up to ties: where they part, the gap between the network's two best logits is shown
  linears  one layer's linears by number of rows: both kernels against cuBLAS with elementwise kernels around it
  plain    tokens/s without speculation by concurrency, step time
  spec     the same with speculation, by depth: acceptance length AL, speed-up S over plain, overhead o = AL / S - 1
  offline  throughput of `--queued` requests
  profile  kernel times of a plain step and of a speculative cycle, and the floor: bytes of the weights over bandwidth

A prompts file has one JSON object a line with `turns`. Answers have `--tokens` tokens; end tokens do not end them, so that
all runs do the same work, unless `--honour-stops` is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_config, load_decoder
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.device_batch import DEVICE_PAGE_SIZE, GREEDY, DeviceBatch, Entry
from fledge.engine.device_engine import DeviceEngine
from fledge.engine.offline import DeviceAnswers
from fledge.kernels import fused_linear, triton_support
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.tokenizer import Tokenizer

STAGES = ("checks", "linears", "plain", "spec", "offline", "profile")
# Logits of about 16 to 32 are an eighth apart in bf16; both paths may be off by one such step.
TIE = 0.5
H200_BYTES_PER_S = 4.8e12
DEVICE = "cuda"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--drafter", help="folder of the drafter; without one, no speculation is measured")
    parser.add_argument("--prompts", required=True, help="JSONL file")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--depths", type=numbers, default=[1, 2, 3, 4, 5, 6, 7])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queued", type=int, default=2000)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--honour-stops", action="store_true")
    parser.add_argument("--no-overlap", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--commit", help="of the code, where there is no git")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args()


@dataclass
class Bench:
    args: argparse.Namespace
    decoder: Decoder
    drafter: EagleDrafter | None
    prompts: list[list[int]]
    results: dict[str, object] = field(default_factory=dict)

    def config(self, rows: int) -> EngineConfig:
        config = EngineConfig(
            device=DEVICE,
            dtype="bfloat16",
            page_size=DEVICE_PAGE_SIZE,
            max_num_seqs=rows,
            max_model_len=self.args.max_model_len,
            kv_cache_tokens=rows * (self.args.max_model_len if rows <= 256 else 768),
        )
        return config.resolve(self.decoder.config)

    def answers(self, rows: int, *, speculate: bool = False, capture: bool = True) -> DeviceAnswers:
        drafter = self.drafter if speculate else None
        return DeviceAnswers(self.decoder, self.config(rows), drafter=drafter, capture=capture)

    def engine(self, rows: int, *, speculate: bool = False) -> DeviceEngine:
        speculation = Speculation(self.drafter if speculate else None, max(self.args.depths))
        return build_engine(self.decoder, speculation, self.config(rows))

    def some_prompts(self, count: int, offset: int = 0) -> list[list[int]]:
        return [self.prompts[(offset + index) % len(self.prompts)] for index in range(count)]


def load(args: argparse.Namespace) -> Bench:
    folder = Path(args.model)
    decoder = load_decoder(folder, torch.bfloat16, DEVICE).eval().requires_grad_(False)
    drafter = None
    if args.drafter:
        drafter = load_drafter(Path(args.drafter), load_config(folder)).eval().requires_grad_(False)
        drafter = drafter.to(device=DEVICE, dtype=torch.bfloat16)
    tokenizer = Tokenizer(folder)
    prompts = []
    for line in Path(args.prompts).read_text().splitlines():
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return Bench(args, decoder, drafter, [prompt for prompt in prompts if len(prompt) + args.tokens < args.max_model_len])


# checks


def checks(bench: Bench) -> dict[str, object]:
    tokens = min(bench.args.tokens, 128)
    prompts = bench.some_prompts(8)
    options = {"max_tokens": tokens, "stop_ids": ()}

    def answers(speculate: bool, depth: int, capture: bool, **more) -> list[list[int]]:
        generator = bench.answers(8, speculate=speculate, capture=capture)
        generator.batch.depth = depth
        return [answer.tokens for answer in sorted(generator.generate(prompts, **options, **more))]

    plain = answers(False, 0, True)
    found: dict[str, object] = {"captured_equals_eager": {"plain": plain == answers(False, 0, False)}}
    found["plain_against_the_network"] = against_network(bench.decoder, prompts, plain)
    if bench.drafter is not None:
        for depth in (1, 5):
            speculative = answers(True, depth, True)
            found["captured_equals_eager"][f"depth {depth}"] = speculative == answers(True, depth, False)
            found[f"depth_{depth}_against_the_network"] = against_network(bench.decoder, prompts, speculative)
            found[f"depth_{depth}_against_plain"] = partings(bench.decoder, prompts, plain, speculative)
        drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
        same = [a == b for a, b in zip(answers(False, 0, True, **drawn), answers(True, 3, True, **drawn), strict=True)]
        found["sampled_answers_equal_plain"] = f"{sum(same)} of {len(same)}"
    show("checks", found)
    return found


@torch.inference_mode()
def logits_of(decoder: Decoder, prompt: list[int], answer: list[int]) -> Tensor:
    text = torch.tensor(prompt + answer[:-1], device=DEVICE)
    hidden, _ = decoder(text, torch.arange(len(text), device=DEVICE), causal_attend())
    return decoder.logits(hidden[len(prompt) - 1 :]).float()


def against_network(decoder: Decoder, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, object]:
    """The plain network reads each answer; how far below its own choice the said tokens were."""
    widest, differing, total = 0.0, 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = logits_of(decoder, prompt, answer)
        gaps = logits.max(-1).values - logits.gather(-1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
        widest, differing, total = max(widest, float(gaps.max())), differing + int((gaps > 0).sum()), total + len(answer)
    return {"tokens": total, "differing": differing, "widest_gap": widest, "ties_only": widest <= TIE}


def partings(decoder: Decoder, prompts: list[list[int]], plain: list[list[int]], other: list[list[int]]) -> dict[str, object]:
    """Where two answers part, the gap between the network's logits of the two tokens."""
    gaps = []
    for prompt, one, two in zip(prompts, plain, other, strict=True):
        place = next((index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
        if place is not None:
            row = logits_of(decoder, prompt, one)[place]
            gaps.append(abs(float(row[one[place]] - row[two[place]])))
    return {"equal": len(plain) - len(gaps), "parted": len(gaps), "gaps": gaps, "ties_only": max(gaps, default=0.0) <= TIE}


# linears


def linears(bench: Bench) -> dict[str, object]:
    layer, head = bench.decoder.layers[0], bench.decoder.lm_head.weight
    size, wide = head.shape[1], layer.mlp.down_proj.weight.shape[1]
    norm = fused_linear.Norm(layer.input_layernorm.weight, layer.input_layernorm.eps)
    found = {}
    for rows in (1, 2, 4, 6, 8, 16, 24, 32, 64, 128):
        x, inner = (torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16) for width in (size, wide))
        cases = {
            "norm+qkv": (x, layer.self_attn.qkv_proj.weight, {"norm": norm}),
            "o+residual": (x[:, : layer.self_attn.o_proj.weight.shape[1]], layer.self_attn.o_proj.weight, {"residual_MO": x}),
            "norm+gate_up": (x, layer.mlp.gate_up_proj.weight, {"norm": norm, "gated": True}),
            "down+residual": (inner, layer.mlp.down_proj.weight, {"residual_MO": x}),
        }
        for name, (inputs, weight, options) in cases.items():
            kernels = [kernel for kernel, most in (("vector", 8), ("whole", 16), ("tile", 128)) if rows <= most]
            run = fused_linear.fused_linear_triton
            ways: dict[str, Callable] = {kernel: partial(run, inputs, weight, **options, kernel=kernel) for kernel in kernels}
            ways["cublas"] = partial(fused_linear.wide_linear, inputs, weight, **options)
            found[f"{name}, {rows} rows"] = {way: graph_time(run) for way, run in ways.items()}
    show("linears: microseconds in a chain of 20", found)
    return found


def graph_time(run: Callable[[], object], repeats: int = 20, rounds: int = 30) -> float:
    """Microseconds of one call within a graph of many."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return event_time(graph.replay, rounds) / repeats


def event_time(run: Callable[[], object], rounds: int) -> float:
    """Microseconds a call, on the device, warm."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / rounds


# speed


def speed(bench: Bench, engine: DeviceEngine, concurrency: int, depth: int) -> dict[str, float]:
    """End to end over waves of `concurrency` requests, prompts included, and the device's own time a step."""
    engine.depths.choose = lambda *_: depth
    params = SamplingParams(max_tokens=bench.args.tokens, temperature=0, ignore_eos=not bench.args.honour_stops)

    def wave(turn: int) -> tuple[int, float]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        requests = [engine.add_request(prompt, params) for prompt in bench.some_prompts(concurrency, turn * concurrency)]
        while engine.has_unfinished():
            engine.step()
        return sum(request.num_answer for request in requests), time.perf_counter() - started

    wave(0)  # kernels are compiled, graphs recorded
    before = replace(engine.stats)
    total = statistics.median(count / seconds for count, seconds in (wave(turn) for turn in range(bench.args.rounds)))
    steps = engine.stats.steps - before.steps
    return {
        "tokens_per_s": total,
        "tokens_per_s_per_user": total / concurrency,
        "acceptance_length": 1 + (engine.stats.accepted - before.accepted) / steps if steps else 1.0,
        "step_us": step_time(bench, engine.rows, concurrency, depth),
    }


def filled(bench: Bench, rows: DeviceBatch, concurrency: int, tokens: int) -> None:
    rows.slots.clear()
    page, entries = 0, []
    for row, prompt in enumerate(bench.some_prompts(concurrency)):
        count = rows.pages_for(len(prompt), tokens)
        entries.append(Entry(row, prompt, range(page, page + count), tokens))
        page += count
    rows.read_prompts(entries)


@torch.inference_mode()
def step_time(bench: Bench, rows: DeviceBatch, concurrency: int, depth: int, steps: int = 40) -> float:
    """Microseconds a replay, all rows running."""
    size = next(size for size in rows.sizes if size >= concurrency)
    tokens = (depth + 1) * (steps + 8)
    filled(bench, rows, concurrency, tokens)
    for _ in range(3):
        rows.graphs.run(size, depth, GREEDY)
    found = event_time(lambda: rows.graphs.run(size, depth, GREEDY), steps)
    assert int(rows.slots.state.active.sum()) == concurrency, "a row ended while it was timed"
    rows.slots.clear()
    return found


def plain(bench: Bench) -> dict[str, object]:
    engine = bench.engine(max(bench.args.concurrency))
    found = {str(count): speed(bench, engine, count, 0) for count in bench.args.concurrency}
    show("plain", found)
    return found


def spec(bench: Bench) -> dict[str, object]:
    baseline = bench.results.get("plain") or plain(bench)
    bench.results["plain"] = baseline
    engine = bench.engine(max(bench.args.concurrency), speculate=True)
    found = {}
    for count in bench.args.concurrency:
        for depth in bench.args.depths:
            figures = speed(bench, engine, count, depth)
            figures["speed_up"] = figures["tokens_per_s"] / baseline[str(count)]["tokens_per_s"]
            figures["overhead"] = figures["acceptance_length"] / figures["speed_up"] - 1
            figures["cycle_over_step"] = figures["step_us"] / baseline[str(count)]["step_us"]
            found[f"{count}, depth {depth}"] = figures
    show("speculation", found)
    return found


def offline(bench: Bench) -> dict[str, object]:
    found = {}
    for name, depth in [("plain", 0)] + ([("depth 3", 3)] if bench.drafter is not None else []):
        generator = bench.answers(1024, speculate=depth > 0)
        generator.batch.depth = depth
        options = {"max_tokens": bench.args.tokens, "stop_ids": bench.decoder.config.eos_token_ids}
        list(generator.generate(bench.some_prompts(bench.args.queued), **options))
        started = time.perf_counter()
        count = sum(len(answer.tokens) for answer in generator.generate(bench.some_prompts(bench.args.queued), **options))
        seconds = time.perf_counter() - started
        found[name] = {"requests": bench.args.queued, "tokens": count, "seconds": seconds, "tokens_per_s": count / seconds}
        del generator
    show("offline", found)
    return found


# where the time goes


def profile(bench: Bench) -> dict[str, object]:
    parameters = {id(p): p.numel() * p.element_size() for p in bench.decoder.parameters()}
    floor = sum(parameters.values()) / H200_BYTES_PER_S * 1e6
    found: dict[str, object] = {"floor_us": floor}
    for count in (1, 64):
        for depth in [0] + ([5 if count == 1 else 3] if bench.drafter is not None else []):
            rows = bench.answers(count, speculate=depth > 0).batch.rows
            step = step_time(bench, rows, count, depth)
            found[f"batch {count}, depth {depth}"] = {"step_us": step, "over_floor": step / floor} | kernel_times(
                bench, rows, count, depth
            )
    show("profile: microseconds a step, launches a step", found)
    return found


@torch.inference_mode()
def kernel_times(bench: Bench, rows: DeviceBatch, concurrency: int, depth: int, steps: int = 10) -> dict[str, object]:
    filled(bench, rows, concurrency, (depth + 1) * (steps + 8))
    rows.graphs.run(concurrency, depth, GREEDY)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            rows.graphs.run(concurrency, depth, GREEDY)
        torch.cuda.synchronize()
    kernels = {
        event.key[:60]: {"us": event.self_device_time_total / steps, "launches": event.count / steps}
        for event in recorded.key_averages()
        if event.self_device_time_total
    }
    rows.slots.clear()
    ordered = dict(sorted(kernels.items(), key=lambda item: -item[1]["us"]))
    launches = sum(kernel["launches"] for kernel in kernels.values())
    return {"launches": launches, "sum_us": sum(kernel["us"] for kernel in kernels.values()), "kernels": ordered}


def show(title: str, figures: dict[str, object]) -> None:
    print(f"\n== {title}")
    for name, value in figures.items():
        if isinstance(value, dict) and "kernels" in value:
            print(f"  {name}: " + ", ".join(f"{k} {brief(v)}" for k, v in value.items() if k != "kernels"))
            for kernel, times in value["kernels"].items():
                print(f"      {times['us']:9.1f} us  x{times['launches']:6.1f}  {kernel}")
        elif isinstance(value, dict):
            print(f"  {name:>24}  " + "  ".join(f"{k} {brief(v)}" for k, v in value.items()))
        else:
            print(f"  {name:>24}  {brief(value)}")


def brief(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    args = arguments()
    triton_support.OVERLAP = not args.no_overlap
    torch.cuda.set_device(0)
    bench = load(args)
    for stage in args.stages.split(","):
        started = time.perf_counter()
        bench.results[stage] = globals()[stage](bench)
        print(f"   ({stage}: {time.perf_counter() - started:.0f} s)", flush=True)
        torch.cuda.empty_cache()
        if args.json:
            origin = provenance(bench.prompts) | ({"commit": args.commit} if args.commit else {})
            write_json(args.json, {"provenance": origin, "tokens": args.tokens, **bench.results})


if __name__ == "__main__":
    main()
