"""Measures the engine on a GPU: whether its answers are right, how fast it is, and where the time goes.

    python benchmarks/gpu.py --model FOLDER --drafter FOLDER --prompts humaneval.jsonl --json results.json
    python benchmarks/gpu.py --shape 1.5b,8b --vllm-site FOLDER --json results.json
    python benchmarks/gpu.py --shape 30b-a3b,8b,8b-fp8,8b-int4 --concurrency 1,4,16,64 --vllm-site FOLDER --json results.json

The second form makes models of published shapes (135m, 0.5b, 1.5b, 8b, 14b, 32b; 30b-a3b: Qwen3's experts; 8b-fp8 and 8b-int4:
layers as in an FP8 and an AWQ checkpoint) with random weights on the device. It has its own stages (`gpu_sizes.py`), and also
takes stages of the first form that need no text:
  steps      times of plain steps and cycles by rows, the same on cuBLAS, and the least time the device could take
  prefill    tokens/s for 16 prompts of 1,900 tokens
  loop       closed loop of plain decoding
  vllm       the same with vLLM and dummy weights; `--vllm-site`: the folder it was unpacked to
  start      time from a new process to a ready engine, with and without compiled kernels
  fit        whether it starts with default settings in `--memory-gib`

Stages (`--stages checks,attention,…`), each measured warm, as medians of `--rounds`:
  checks     captured steps equal the same steps run eagerly; answers equal the plain network's, and speculative ones the plain
             ones, up to ties: where they differ, the gap between the network's logits of the two tokens is shown
  identity   `--identity-prompts` prompts, greedy and seeded: plain and speculative, alone, in a batch of 64, under changing
             load, with prefix reuse and chunked; how many answers equal those of plain decoding alone (also with --shape)
  attention  one layer's attention by batch, context and number of new tokens
  plain      without speculation by concurrency: tokens/s overall (prompts included) and while answering, step time
  spec       the same with speculation, by depth: acceptance length AL, speed-up S over plain, overhead o = AL / S - 1; the
             fastest depth, and the speed when the engine chooses the depth itself
  guard      the cost of the drift guard's probes, run sixteen times as often as in a server
  settings   step times with one setting changed: attention's launch configuration, overlap of kernels, choice of linears
  parts      step times with one part left out (attention, MLP, the head): what each part costs inside a step
  modes      int8, int4 and FP8 against bf16: speed, agreement, answers that do not depend on the batch
  offline    throughput of `--queued` requests
  options    tokens/s with each sampling option against the same requests without it, at 1 and 16 users; 16 users with a
             different option each; cycle times of every drafting method
  long       131,072 tokens, the model with YaRN: time of prefill, time per token by context, memory against the formula
  vllm       vLLM on the same card, model, drafter, prompts and loop; `--vllm-path`: the folder it was unpacked to
  profile    kernel times of a plain step and of a speculative cycle, without overlap (otherwise they include waiting), and the
             floor: bytes of the weights over bandwidth

Speeds are those of a closed loop: as many requests are running as there are users, and the next one enters when one is done.
A prompts file has one JSON object with `turns` per line. Answers have `--tokens` tokens; end tokens are ignored, so that all
runs do the same work, unless `--honour-stops` is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from gpu_checks import against_network, partings
from gpu_identity import compare
from gpu_kernels import attention_times, left_out
from gpu_linear_forms import measured_without
from gpu_long import long_context
from gpu_loop import closed_loop, force_depth, record_ahead
from gpu_modes import MODES, compare_modes
from gpu_options import OPTION_USERS, options
from gpu_shapes import SHAPES, random_prompts
from gpu_show import show, shown
from gpu_sizes import CONTEXT, SHAPE_STAGES, ShapeBench, print_table
from gpu_steps import forget, profile, step_time

from fledge.bench.baselines import run_baseline
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_config, load_decoder
from fledge.drift.live import EVERY_LAUNCHES, watch_drafts
from fledge.engine.admission import AdmissionPolicy, OfflineRefill
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import DEVICE_PAGE_SIZE, EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.batch_state import GREEDY
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.engine.offline import AnswerGenerator
from fledge.kernels import triton_support
from fledge.kernels.attention import launch_config
from fledge.kernels.linear import dispatch
from fledge.models import decoder as decoder_module
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.tokenizer import Tokenizer

DEVICE = "cuda"
LAUNCHES_A_LOOK = EVERY_LAUNCHES // 16  # at a server's interval there are too few probes to measure their cost


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="", help=f"instead of a model and prompts, with commas: {', '.join(SHAPES)}")
    parser.add_argument("--model", help="folder of the target")
    parser.add_argument("--drafter", help="folder of the drafter; without one, no speculation is measured")
    parser.add_argument("--prompts", help="JSONL file")
    parser.add_argument("--stages", default="")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--depths", type=numbers, default=[2, 3, 4, 5, 7])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queued", type=int, default=2000)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--modes", default=",".join(MODES), help="quantisations in the stage `modes`")
    parser.add_argument("--option-users", type=numbers, default=OPTION_USERS, help="concurrencies in the stage `options`")
    parser.add_argument("--option-parts", default="cycles,speculative,plain", help="parts of the stage `options`")
    parser.add_argument("--option-names", default="", help="options to measure in it, with commas; empty: all")
    parser.add_argument("--option-requests", type=int, default=4, help="requests per user in it")
    parser.add_argument("--option-depth", type=int, default=3, help="depth of its speculative runs")
    parser.add_argument("--identity-prompts", type=int, default=80)
    parser.add_argument("--identity-tokens", type=int, default=256)
    parser.add_argument("--step-depth", type=int, default=3, help="depth of the cycles in the stage `steps`")
    parser.add_argument("--no-cublas", dest="cublas", action="store_false", help="do not measure cuBLAS in the stage `steps`")
    parser.add_argument("--loop-users", type=numbers, default=[1, 16], help="concurrencies in the stage `loop`")
    parser.add_argument("--memory-gib", type=float, default=0, help="memory limit in the stage `fit`; 0: the device's memory")
    parser.add_argument("--vllm-path", "--vllm-site", dest="vllm_path", default="", help="folder to import vLLM from")
    parser.add_argument("--vllm-memory", type=float, default=0.9, help="fraction of the device's memory, with --shape")
    parser.add_argument("--vllm-depths", type=numbers, default=[3])
    parser.add_argument("--no-vllm-plain", action="store_true", help="vLLM with the drafter only")
    parser.add_argument(
        "--vllm-seconds", type=float, default=3600, help="time limit of vLLM; what it measured until then counts"
    )
    parser.add_argument("--honour-stops", action="store_true")
    parser.add_argument("--no-overlap", dest="overlap", action="store_false", help="see kernels/triton_support.py")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no stage begins after this time")
    parser.add_argument("--commit", help="commit of the code, if there is no git")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    stages = SHAPE_STAGES | STAGES if args.shape else STAGES
    usual = f"steps,prefill,loop{',vllm' * bool(args.vllm_path)}" if args.shape else ",".join(STAGES)
    args.stages = args.stages or usual
    if unknown := [stage for stage in args.stages.split(",") if stage not in stages]:
        parser.error(f"there is no stage {unknown[0]!r}; there are {', '.join(stages)}")
    if unknown := [shape for shape in args.shape.split(",") if args.shape and shape not in SHAPES]:
        parser.error(f"there is no shape {unknown[0]!r}; there are {', '.join(SHAPES)}")
    if not args.shape and not (args.model and args.prompts):
        parser.error("give --model and --prompts, or --shape")
    return args


@dataclass
class Bench:
    args: argparse.Namespace
    decoder: Decoder
    drafter: EagleDrafter | None
    prompts: list[list[int]]
    results: dict[str, object] = field(default_factory=dict)
    device: str = DEVICE
    capture: bool = True  # False: run the captured executor's functions without graphs, on any device

    def config(self, rows: int) -> EngineConfig:
        config = EngineConfig(
            device=self.device,
            dtype="bfloat16" if self.device == DEVICE else "float32",
            page_size=DEVICE_PAGE_SIZE,
            max_num_seqs=rows,
            max_model_len=self.args.max_model_len,
            kv_cache_tokens=rows * (self.args.max_model_len + DEVICE_PAGE_SIZE if rows <= 256 else 768),
            prefix_caching=False,  # every run has the same prompts
        )
        return config.resolve(self.decoder.config)

    def build(
        self,
        rows: int,
        speculation: Speculation | None = None,
        *,
        capture: bool | None = None,
        admission: AdmissionPolicy | None = None,
    ) -> Engine:
        """An engine for `rows` requests. `speculation` None: plain decoding; `capture` None: the benchmark's setting."""
        captured = self.capture if capture is None else capture
        speculation = speculation or Speculation(None)
        return build_engine(
            self.decoder, speculation, self.config(rows), capture=None if captured else False, admission=admission
        )

    def answers(self, rows: int, *, depth: int = 0, capture: bool | None = None) -> AnswerGenerator:
        """An offline generator with a fixed depth; 0: plain decoding."""
        speculation = Speculation(self.drafter, depth).fixed_depth() if depth else None
        return AnswerGenerator(self.build(rows, speculation, capture=capture, admission=OfflineRefill()))

    def batch(self, rows: int) -> DeviceBatch:
        """A batch to run single cycles on, with any depth that is measured."""
        return self.build(rows, Speculation(self.drafter, max(self.args.depths))).executor.batch

    def engine(self, rows: int, *, speculate: bool = False) -> Engine:
        """A warm engine, as in a server: cycles of all depths and prefill passes are captured before they are needed."""
        engine = self.build(rows, Speculation(self.drafter if speculate else None, max(self.args.depths)))
        depths = [0, *engine.controller.acceptance.depths][::-1]
        record_ahead(engine, rows, depths, [GREEDY], [len(prompt) for prompt in self.prompts])
        return engine

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
    tokens = min(bench.args.tokens, 64)
    prompts = bench.some_prompts(8)
    options = {"max_tokens": tokens, "stop_ids": ()}

    def answers(depth: int, capture: bool, **more) -> list[list[int]]:
        generator = bench.answers(8, depth=depth, capture=capture)
        return [answer.tokens for answer in sorted(generator.generate(prompts, **options, **more))]

    plain = answers(0, True)
    found: dict[str, object] = {"captured_equals_eager": {"plain": plain == answers(0, False)}}
    found["plain_against_the_network"] = against_network(bench.decoder, prompts, plain)
    single = [answer.tokens for answer in bench.answers(1).generate(prompts[:1], **options)]
    found["one_row_against_the_network"] = against_network(bench.decoder, prompts[:1], single)
    if bench.drafter is not None:
        speculative = answers(3, True)
        found["captured_equals_eager"]["depth 3"] = speculative == answers(3, False)
        found["depth_3_against_the_network"] = against_network(bench.decoder, prompts, speculative)
        found["depth_3_against_plain"] = partings(bench.decoder, prompts, plain, speculative)
        drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
        same = [a == b for a, b in zip(answers(0, True, **drawn), answers(3, True, **drawn), strict=True)]
        found["sampled_answers_equal_plain"] = f"{sum(same)} of {len(same)}"
    show("checks", found)
    return found


def identity(bench: Bench) -> dict[str, object]:
    print("\n== identity: answers equal to those of plain decoding alone")
    return compare(bench.decoder, bench.drafter, bench.prompts, bench.args, bench.device, None if bench.capture else False)


# kernels alone


def attention(bench: Bench) -> dict[str, object]:
    found = attention_times(bench.decoder.config, bench.args.max_model_len)
    show("attention: microseconds in a chain", found)
    return found


# speed


def num_requests(concurrency: int) -> int:
    """Requests of a closed loop. Many at low load too: acceptance differs by prompt, and at the end some users have none."""
    return max(32, min(64, 16 * concurrency), 8 * concurrency)


def speed(bench: Bench, engine: Engine, concurrency: int, depth: int | None) -> dict[str, float]:
    """Figures of a closed loop, and the device's time per step. `depth` None: the engine chooses it."""
    force_depth(engine, depth)
    params = SamplingParams(max_tokens=bench.args.tokens, temperature=0, ignore_eos=not bench.args.honour_stops)

    def run(count: int):
        return closed_loop(engine, bench.some_prompts(count), [params] * count, concurrency)

    run(max(2 * concurrency, 16))  # warm-up: compiles kernels and captures what was not captured ahead
    before = replace(engine.stats)
    loops = [run(num_requests(concurrency)) for _ in range(bench.args.rounds)]
    steps = engine.stats.steps - before.steps
    total = statistics.median(loop.tokens_per_s for loop in loops)
    found = {
        "tokens_per_s": total,
        "tokens_per_s_per_user": total / concurrency,
        "answering_tokens_per_s_per_user": statistics.median(loop.own_tokens_per_s for loop in loops),
        "acceptance_length": 1 + (engine.stats.accepted - before.accepted) / steps if steps else 1.0,
    }
    if depth is None:
        found["usual_depth"] = sum((loop.depths for loop in loops), Counter()).most_common(1)[0][0]
    else:
        found["step_us"] = step_time(bench, engine.executor.batch, concurrency, depth)
    return found


def plain(bench: Bench) -> dict[str, object]:
    engine = bench.engine(max(bench.args.concurrency))
    print("\n== plain")
    return {str(count): shown(str(count), speed(bench, engine, count, 0)) for count in bench.args.concurrency}


def spec(bench: Bench) -> dict[str, object]:
    baseline = bench.results["plain"] = bench.results.get("plain") or plain(bench)
    engine = bench.engine(max(bench.args.concurrency), speculate=True)
    print("\n== speculation")
    found: dict[str, object] = {}
    for count in bench.args.concurrency:
        single = baseline[str(count)]
        for depth in [*bench.args.depths, None]:
            figures = speed(bench, engine, count, depth)
            figures["speed_up"] = figures["tokens_per_s"] / single["tokens_per_s"]
            figures["overhead"] = figures["acceptance_length"] / figures["speed_up"] - 1
            if depth is not None:
                figures["cycle_over_step"] = figures["step_us"] / single["step_us"]
            name = f"{count}, depth {depth}" if depth is not None else f"{count}, chosen"
            found[name] = shown(name, figures)
        fastest = max(bench.args.depths, key=lambda depth: found[f"{count}, depth {depth}"]["tokens_per_s"])
        lost = 1 - found[f"{count}, chosen"]["tokens_per_s"] / found[f"{count}, depth {fastest}"]["tokens_per_s"]
        chosen = found[f"{count}, chosen"]["usual_depth"]
        summary = {"recommended_depth": fastest, "chosen_depth": chosen, "lost_by_choosing": lost}
        found[f"{count}, summary"] = shown(f"{count}, summary", summary)
    return found


def guard(bench: Bench) -> dict[str, object]:
    found = {}
    for concurrency in [count for count in bench.args.concurrency if count <= 16]:
        engine = bench.engine(concurrency, speculate=True)
        probe = watch_drafts(engine, every=LAUNCHES_A_LOOK, sink=0)
        looking, speeds = engine.executor.before_drafts, {True: [], False: []}
        for watched in (False, True, True, False):  # in this order a steady drift of the speed affects both equally
            engine.executor.before_drafts = looking if watched else None
            speeds[watched].append(speed(bench, engine, concurrency, None)["tokens_per_s"])
        watched, unwatched = statistics.mean(speeds[True]), statistics.mean(speeds[False])
        cost = 1 - watched / unwatched
        figures = {"unwatched_tokens_per_s": unwatched, "tokens_per_s": watched, "every": LAUNCHES_A_LOOK, "cost": cost}
        found[str(concurrency)] = {**figures, "cost_in_a_server": cost * LAUNCHES_A_LOOK / EVERY_LAUNCHES, **probe.snapshot()}
        del engine
    show("drift probe", found)
    return found


@torch.inference_mode()
def settings(bench: Bench) -> dict[str, object]:
    """Step times of each shape unchanged, then with one setting changed."""
    many_rows = [(16, 0), (64, 0)] + ([(4, 4), (16, 4)] if bench.drafter is not None else [])
    few_rows = [(1, 0), (4, 0)] + ([(1, 4)] if bench.drafter is not None else [])
    changes = {
        "as it is": (few_rows + many_rows, triton_support, "OVERLAP", triton_support.OVERLAP),
        "attention begins with 256 keys": (few_rows + many_rows, launch_config, "few_programs", lambda device: 0),
        "with up to 24 programs, 512": (many_rows, launch_config, "few_programs", lambda device: 24),
        "linears by rules": (few_rows + many_rows, dispatch, "CONFIGS", {}),
        "without staged_mma": (many_rows, dispatch, "CONFIGS", measured_without("staged_mma")),
        "every layer holds": (few_rows, decoder_module, "PDL_BARRIER_LAYERS", len(bench.decoder.layers)),
        "no overlap": (few_rows, triton_support, "OVERLAP", False),
    }
    rows = bench.batch(64)
    found: dict[str, object] = {}
    for name, (shapes, module, setting, value) in changes.items():
        before = getattr(module, setting)
        setattr(module, setting, value)
        forget(rows)
        found[name] = {f"batch {count}, depth {depth}": step_time(bench, rows, count, depth) for count, depth in shapes}
        setattr(module, setting, before)
    show("settings: microseconds a step", found)
    return found


@torch.inference_mode()
def parts(bench: Bench) -> dict[str, object]:
    """Step times without one part: the tokens are wrong, but the time saved is what the part costs inside a step."""
    shapes = [(1, 0), (4, 0), (16, 0), (64, 0)] + ([(1, 4), (4, 4), (16, 4)] if bench.drafter is not None else [])
    rows = bench.batch(64)
    found: dict[str, object] = {}
    for name, change in left_out(rows).items():
        forget(rows)
        with change():
            found[name] = {f"batch {count}, depth {depth}": step_time(bench, rows, count, depth) for count, depth in shapes}
    forget(rows)
    show("parts: microseconds a step without …", found)
    return found


def modes(bench: Bench) -> dict[str, object]:
    print("\n== modes")
    return compare_modes(bench, speed, shown)


def long(bench: Bench) -> dict[str, object]:
    found = long_context(bench.decoder, bench.drafter)
    show("long context", found)
    return found


def vllm(bench: Bench) -> dict[str, object]:
    """Runs vLLM in its own process, with 60 % of the GPU's memory; this process keeps its weights there meanwhile."""
    args = bench.args
    found = run_baseline(
        "vllm",
        bench.prompts,
        model=Path(args.model),
        drafter=Path(args.drafter) if args.drafter else None,
        depths=args.vllm_depths,
        concurrencies=args.concurrency,
        max_tokens=args.tokens,
        device=DEVICE,
        path=args.vllm_path,
        ignore_eos=not args.honour_stops,
        requests={str(count): num_requests(count) for count in args.concurrency},
        timeout=args.vllm_seconds,
        plain=not args.no_vllm_plain,
    )
    for run in found.get("runs", ()):
        run.pop("answers", None)
        run["per_user"] = run["tokens_per_second"] / run["concurrency"]
        shown(f"{run['label']}, {run['concurrency']}", {k: v for k, v in run.items() if k not in ("label", "concurrency")})
    if "skipped" in found:
        print(f"  vLLM did not run: {found['skipped']}")
    return found


def offline(bench: Bench) -> dict[str, object]:
    found = {}
    for name, depth in [("plain", 0)] + ([("depth 3", 3)] if bench.drafter is not None else []):
        generator = bench.answers(1024, depth=depth)
        options = {"max_tokens": bench.args.tokens, "stop_ids": bench.decoder.config.eos_token_ids}
        list(generator.generate(bench.some_prompts(bench.args.queued), **options))
        started = time.perf_counter()
        count = sum(len(answer.tokens) for answer in generator.generate(bench.some_prompts(bench.args.queued), **options))
        seconds = time.perf_counter() - started
        found[name] = {"requests": bench.args.queued, "tokens": count, "seconds": seconds, "tokens_per_s": count / seconds}
        del generator
    show("offline", found)
    return found


SPEEDS = (plain, spec, guard, settings, parts, attention, profile, modes, options, offline, long, vllm)
STAGES = {stage.__name__: stage for stage in (checks, identity, *SPEEDS)}


def measure_shapes(args: argparse.Namespace, write: Callable[..., None]) -> None:
    """Runs all stages of one shape, then of the next."""
    began, results = time.perf_counter(), {}
    for name in args.shape.split(","):
        shape = ShapeBench(name, SHAPES[name], args)
        results[name] = shape.results
        for stage in args.stages.split(","):
            print(f"\n== {name}: {stage}", flush=True)
            started = time.perf_counter()
            if started - began > args.seconds:
                print("   skipped: --seconds is over")
                continue
            if stage in SHAPE_STAGES:
                shape.results[stage] = SHAPE_STAGES[stage](shape)
            else:
                prompts = random_prompts(shape.config, 80, CONTEXT, least=CONTEXT if stage != "identity" else 8)
                shape.results[stage] = STAGES[stage](Bench(args, shape.decoder, shape.drafter, prompts))
            print(f"   ({stage}: {time.perf_counter() - started:.0f} s)", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            write({"shapes": results})
        print_table(shape.results)
        shape.free()


def measure_model(args: argparse.Namespace, write: Callable[..., None]) -> None:
    began = time.perf_counter()
    bench = load(args)
    for stage in args.stages.split(","):
        started = time.perf_counter()
        if started - began > args.seconds:
            print(f"{stage} is skipped: --seconds is over")
            continue
        bench.results[stage] = STAGES[stage](bench)
        print(f"   ({stage}: {time.perf_counter() - started:.0f} s)", flush=True)
        torch.cuda.empty_cache()
        write({"tokens": args.tokens, **bench.results}, bench.prompts)


def main() -> None:
    args = arguments()
    triton_support.OVERLAP = args.overlap
    torch.cuda.set_device(0)

    def write(results: Mapping[str, object], prompts: Sequence[object] = ()) -> None:
        """Writes the results. Called after every stage, so that an aborted run keeps its finished stages."""
        if args.json:
            origin = provenance(prompts) | ({"commit": args.commit} if args.commit else {})
            write_json(args.json, {"provenance": origin, **results})

    (measure_shapes if args.shape else measure_model)(args, write)


if __name__ == "__main__":
    main()
