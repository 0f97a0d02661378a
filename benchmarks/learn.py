"""Measures the gain and the cost of `fledge serve --learn` on one device.

    python benchmarks/learn.py all --data DIR --output learn.json        all of these, in one process; 25 minutes on an H200
    python benchmarks/learn.py stream --data DIR                         code in other programming languages
    python benchmarks/learn.py stream --kinds german spanish french      the generated stream of `learn_stream.py`
    python benchmarks/learn.py day0 --data DIR                           without a drafter at first, against the shipped one
    python benchmarks/learn.py cost                                      tokens/s and inter-token latency, with and without
    python benchmarks/learn.py probe --kinds german json                 the shipped drafter's acceptance by kind of prompt

`--data`: a folder with stream/code.jsonl.gz, eval/*.jsonl and train/prompts.jsonl.gz. `stream`: acceptance length at depth 5 on
held-out prompts of the stream and on old sets, before and after some thousands of requests, compared with the frozen drafter
and with one trained offline on the same answers. Held-out prompts are served with learning switched off. Requests arrive at
random, `--rate` per second: how much is learned from one depends on the time until the next. `--toy`: a toy target on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import gzip
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from learn_curve import draw
from learn_stream import KINDS, prompts

from fledge import sources
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.drafters import default_drafter
from fledge.drift.metrics import Count, acceptance_length, length_ratio
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.learning.config import LearnConfig
from fledge.learning.hook import Learning
from fledge.learning.samples import Sample
from fledge.learning.setup import build_learning_engine
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.tokenizer import Tokenizer
from fledge.training.arm import learning_rate_factor
from fledge.training.recipe import OptimizerRecipe
from fledge.training.targets import toy

MODEL = "smollm2-135m"
REACHED_IN_A_ROW = 2  # consecutive measurements of day 0 that must reach the aim: a single one may be chance


class Setting:
    """The target, the drafter, the tokenizer, and the configuration of engines."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer: Tokenizer | None = None
        # Two engines may share the device, so neither may take all of its memory.
        tokens = args.users * args.max_model_len
        sizes = {"max_num_seqs": args.users, "max_model_len": args.max_model_len, "kv_cache_tokens": tokens}
        self.config = EngineConfig(device=args.device, **sizes)
        if args.toy:
            self.decoder: Decoder = toy.learned_target(60)
            self.drafter: EagleDrafter | None = None
            self.config = replace(self.config, dtype="float32", kv_cache_tokens=8192, max_model_len=256)
        else:
            folder = sources.resolve(MODEL)
            self.tokenizer = Tokenizer(folder)
            self.decoder = load_decoder(folder, torch.float32)
            self.drafter = load_drafter(default_drafter(MODEL))

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        assert self.tokenizer is not None
        for text in texts:
            prompt = self.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            if len(prompt) + self.args.tokens < self.args.max_model_len:
                yield prompt

    def learn_config(self, **more: Any) -> LearnConfig:
        args = self.args
        settings = {"budget": args.budget, "learning_rate": args.learning_rate, "seed": args.seed} | more
        if args.toy:
            settings |= {"memory_mb": 4, "batch_tokens": 384, "steps_per_candidate": 4, "min_held_out": 4}
        return LearnConfig(**{name: value for name, value in settings.items() if value is not None})

    def speculation(self, drafter: EagleDrafter | None, *, fixed: bool = True) -> Speculation:
        speculation = Speculation(copy.deepcopy(drafter), self.args.depth)
        return speculation.fixed_depth() if fixed else speculation

    def learning(self, drafter: EagleDrafter | None, fixed_prompts: Sequence[Sequence[int]], **options: Any) -> Engine:
        engine = build_learning_engine(
            copy.deepcopy(self.decoder),
            self.speculation(drafter, fixed=options.pop("fixed", True)),
            self.config,
            self.learn_config(**options),
            tokenizer=None,
            fixed_prompts=fixed_prompts,
        )
        for line in engine.warm_up():
            print(line, flush=True)
        if self.args.toy:
            engine.drafter.fallback = None  # no n-grams, only the drafter
        return engine

    def plain(self, drafter: EagleDrafter | None, *, fixed: bool = True) -> Engine:
        engine = build_engine(copy.deepcopy(self.decoder), self.speculation(drafter, fixed=fixed), self.config)
        engine.warm_up()
        return engine


def read_prompts(path: Path) -> list[str]:
    """First turns of a JSONL file, plain or gzipped, or of all such files in a folder."""
    if path.is_dir():
        return [text for file in sorted(path.glob("*.jsonl*")) for text in read_prompts(file)]
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()  # bytes: texts may contain U+2028
    return [json.loads(line)["turns"][0] for line in lines]


def apart(path: Path, count: int) -> tuple[list[str], list[str]]:
    """The first `count` prompts of a file, and the others without those of the same tasks: MBJP/92 and MBKP/92 ask for the same
    function in two programming languages."""
    with gzip.open(path, "rt") as file:
        items = [(one["id"].rpartition("/")[2], one["turns"][0]) for one in map(json.loads, file)]
    tasks = {task for task, _ in items[:count]}
    return [text for _, text in items[:count]], [text for task, text in items[count:] if task not in tasks]


def toy_prompts(kind: str, count: int, seed: int) -> list[list[int]]:
    draw_one, found = random.Random(seed), []
    while len(found) < count:
        prompt, _ = toy.conversation(draw_one)
        if toy.WORDS[prompt[1]] == kind:
            found.append(prompt)
    return found


def serve(
    engine: Engine, waiting: Iterator[Sequence[int]], users: int, max_tokens: int, *, rate: float = 0.0, learn: bool = True
) -> list[Request]:
    """Serves all prompts in a closed loop; with a `rate`, they arrive at random, `rate` per second, at most `users` at once."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    done: list[Request] = []
    chance, due, is_left = random.Random(0), time.perf_counter(), True
    while is_left or engine.has_unfinished():
        while is_left and len(engine.requests) < users and (not rate or time.perf_counter() >= due):
            if (prompt := next(waiting, None)) is None:
                is_left = False
                break
            done.append(engine.add_request(prompt, params, learn=learn))
            due += chance.expovariate(rate) if rate else 0.0
        if engine.has_unfinished():
            engine.step()
        elif is_left and not engine.idle():
            time.sleep(max(0.0, min(due - time.perf_counter(), 0.001)))
    return done


def counts_of(requests: Sequence[Request]) -> list[Count]:
    return [Count(request.stats.accepted, request.stats.steps) for request in requests]


class Measured:
    """Measures acceptance on held-out prompts and old sets with learning switched off; counts are by prompt, so that errors
    are paired."""

    def __init__(self, setting: Setting, sets: dict[str, Sequence[Sequence[int]]]) -> None:
        self.sets, self.users, self.tokens = sets, setting.args.users, setting.args.tokens

    def __call__(self, engine: Engine) -> dict[str, list[Count]]:
        hook, engine.hook = engine.hook, None
        found = {
            name: counts_of(serve(engine, iter(some), self.users, self.tokens, learn=False)) for name, some in self.sets.items()
        }
        engine.hook = hook
        return found


def figures(now: dict[str, list[Count]], first: dict[str, list[Count]]) -> dict[str, Any]:
    """Acceptance length by set, its ratio to the first measurement and the standard error; `old`: all sets but the stream."""
    pooled = [
        {**one, "old": [count for name, some in one.items() if name != "stream" for count in some]} for one in (now, first)
    ]
    found: dict[str, Any] = {}
    for name, counts in pooled[0].items():
        if counts:
            found[name] = acceptance_length(counts).value
            ratio = length_ratio(counts, pooled[1][name])
            found[f"{name}_ratio"] = {"value": ratio.value, "error": ratio.error}
    return found


def stream(setting: Setting, *, kinds: Sequence[str] | None, deadline: float) -> dict[str, Any]:
    """Serves a stream and measures what is learned. `kinds`: those of the generated stream; None: the stream in `--data`."""
    args = setting.args
    fixed: list[list[int]] = []
    sets: dict[str, Sequence[Sequence[int]]] = {}
    if args.toy:
        all_prompts = list(dict.fromkeys(map(tuple, toy_prompts("tell", 4 * args.held_out, 1))))
        held_out, served = all_prompts[: args.held_out], all_prompts[args.held_out :]
        fixed, sets = toy_prompts("count", 12, 2), {"count": toy_prompts("count", 8, 3)}
    else:
        if kinds is None:
            first_texts, others = apart(args.data / "stream" / "code.jsonl.gz", args.held_out)
        else:
            texts = list(itertools.islice(prompts(list(kinds), args.seed), args.unique))
            first_texts, others = texts[: args.held_out], texts[args.held_out :]
        held_out, served = list(setting.encode(first_texts)), list(setting.encode(others))
        if args.data:
            replayed = read_prompts(args.data / "train")[:: args.replay_step]
            fixed = list(itertools.islice(setting.encode(replayed), args.fixed))
            sets = {
                path.stem: list(setting.encode(read_prompts(path))) for path in sorted((args.data / "eval").glob("*.jsonl"))
            }
    measured = Measured(setting, {"stream": held_out, **sets})
    engine = setting.learning(setting.drafter, fixed)
    hook = engine.hook
    assert isinstance(hook, Learning)
    first_counts, first_weights = measured(engine), hook.served.weights
    results: dict[str, Any] = {"rate": args.rate, "at": {"0": figures(first_counts, first_counts)}}
    print("0 requests:", results["at"]["0"], flush=True)
    answers: dict[tuple[int, ...], Sample] = {}
    endless, count, began = itertools.cycle(served), 0, time.perf_counter()
    for mark in args.marks:
        done = serve(engine, until(deadline, endless, mark - count), args.users, args.tokens, rate=args.rate)
        count += len(done)
        answers |= {tuple(r.prompt): Sample(list(r.tokens), len(r.prompt)) for r in done if r.num_answer > 1}
        last = results["at"][str(count)] = figures(measured(engine), first_counts)
        results.setdefault("stats", {})[str(count)] = hook.stats() | {"seconds": time.perf_counter() - began}
        counts, spent = hook.learner.counts, hook.budget.spent
        print(
            f"{count} requests:", last, f"generation {hook.served.generation} of {counts.candidates}, {counts.steps} steps, "
            f"{spent.learning:.1f} s of {spent.serving:.0f} s and {spent.idle:.1f} idle", flush=True,
        )  # fmt: skip
        if count < mark:
            results["stopped_at_deadline"] = True
            break
    results |= {"curve": list(hook.journal.curve), "events": list(hook.journal.events), "gain": last["stream_ratio"]}
    if "old_ratio" in last:
        results["old_change"] = last["old_ratio"]
    if args.offline_epochs:
        began = time.perf_counter()
        trained = offline(hook, first_weights, list(answers.values()), args)
        results["offline"] = figures(measured(setting.plain(trained)), first_counts) | {"seconds": time.perf_counter() - began}
        print("offline:", results["offline"], flush=True)
    hook.close()
    return results


def until(deadline: float, endless: Iterator[Sequence[int]], count: int) -> Iterator[Sequence[int]]:
    for prompt in itertools.islice(endless, count):
        if time.perf_counter() > deadline:
            return
        yield prompt


def offline(hook: Learning, first: dict[str, torch.Tensor], samples: list[Sample], args: argparse.Namespace) -> EagleDrafter:
    """The first weights, trained with the learner's steps on all answers of the stream for some epochs: the possible gain."""
    learner, candidate = hook.learner, hook.learner.candidate
    candidate.start_over(first, args.offline_rate)
    room = learner.config.batch_tokens
    batches: list[list[Sample]] = []
    for sample in samples:
        sample.max_states = learner.config.sample_tokens
    for epoch in range(args.offline_epochs):
        mixed = random.Random(epoch).sample(samples, len(samples))
        batch: list[Sample] = []
        for one in [*mixed, *learner.fixed.replay]:
            if sum(other.num_states for other in batch) + one.num_states > room:
                batches.append(batch)
                batch = []
            batch.append(one)
        batches.append(batch)
    is_too_much = len(samples) * 200 > hook.ring.max_tokens  # states do not fit into memory: computed again in every epoch
    for number, batch in enumerate(batches):
        for _ in learner._read_missing(batch):
            pass
        candidate.learning_rate = args.offline_rate * learning_rate_factor((number + 1) / len(batches), OptimizerRecipe())
        for _ in candidate.train([one for one in batch if one.text is not None]):
            pass
        if is_too_much:
            for one in batch:
                one.text = None
    trained = EagleDrafter(candidate.master.config)
    trained.load_state_dict({name: value.detach().cpu() for name, value in candidate.master.state_dict().items()})
    return trained


def cost(setting: Setting) -> dict[str, Any]:
    """Runs closed loops on the same prompts, with and without learning alternately; tokens/s and inter-token times."""
    args, results = setting.args, {}
    if args.toy:
        served = toy_prompts("tell", 64, 1)
    else:
        served = list(setting.encode(itertools.islice(prompts(args.kinds, args.seed), 512)))
    begin = allocated()
    engines = {"without": setting.plain(setting.drafter, fixed=False)}
    plain_bytes = allocated() - begin
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    engines["with"] = setting.learning(setting.drafter, served[:8], fixed=False)
    hook = engines["with"].hook
    assert isinstance(hook, Learning)
    for users in args.cost_users:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for number in range(args.rounds):
            for name in list(engines) if number % 2 else list(engines)[::-1]:
                runs[name].append(timed_loop(engines[name], served, users, args))
                hook.budget.rest()  # the other engine's run must not count as serving time of this one
        found = {name: {key: statistics.median(run[key] for run in some) for key in some[0]} for name, some in runs.items()}
        found["tokens_per_s_ratio"] = found["with"]["tokens_per_s"] / found["without"]["tokens_per_s"]
        found["p99_ratio"] = found["with"]["p99_ms"] / max(found["without"]["p99_ms"], 1e-9)
        found["runs"] = runs
        results[str(users)] = found
        print(users, "users:", json.dumps({name: found[name] for name in found if name != "runs"}), flush=True)
    spent = hook.budget.spent
    results["share_of_time"] = spent.learning / max(spent.serving, 1e-9)
    results["announced_bytes"] = hook.num_bytes
    if torch.cuda.is_available():
        # What is used beyond two engines without learning; includes a training step's buffers, which `num_bytes` does not.
        results["measured_bytes"] = torch.cuda.max_memory_allocated() - begin - 2 * plain_bytes
    results["stats"] = hook.stats()
    return results


def allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def timed_loop(engine: Engine, served: Sequence[Sequence[int]], users: int, args: argparse.Namespace) -> dict[str, float]:
    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
    waiting, last, gaps, tokens = itertools.cycle(served), {}, [], 0
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < args.cost_seconds:
        while len(engine.requests) < users:
            engine.add_request(next(waiting), params)
        for delta in engine.step():
            now = time.perf_counter()
            tokens += len(delta.tokens)
            if delta.request.id in last:
                gaps.append(now - last[delta.request.id])
            last[delta.request.id] = now
            if delta.finished:
                del last[delta.request.id]
    seconds = time.perf_counter() - began
    for request in list(engine.requests.values()):
        engine.abort(request)
    gaps.sort()
    at = {name: gaps[min(len(gaps) - 1, math.ceil(share * len(gaps)))] * 1e3 for name, share in
          (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999))}  # fmt: skip
    return {"tokens_per_s": tokens / seconds, **at, "max_ms": gaps[-1] * 1e3}


def day_zero(setting: Setting, *, deadline: float) -> dict[str, Any]:
    """Starts from the target's last layer; serves until 80 % of the shipped drafter's acceptance on held-out prompts."""
    args = setting.args
    if args.toy:
        all_prompts = toy_prompts("tell", 256, 1)
        held_out, served, aim = all_prompts[:16], all_prompts[16:], 1.5
    else:
        texts = read_prompts(args.data / "train")
        random.Random(args.seed).shuffle(texts)  # the file is sorted by source
        tokens = list(itertools.islice(setting.encode(texts), args.unique))
        held_out, served = tokens[: args.held_out], tokens[args.held_out :]
        aim = 0.8 * acceptance_length(Measured(setting, {"stream": held_out})(setting.plain(setting.drafter))["stream"]).value
    engine = setting.learning(None, [])
    hook = engine.hook
    assert isinstance(hook, Learning)
    measured = Measured(setting, {"stream": held_out})
    results: dict[str, Any] = {"aim": aim, "rate": args.rate, "at": {}, "reached": None}
    endless, count, began, aside, in_a_row = itertools.cycle(served), 0, time.perf_counter(), 0.0, []
    while True:
        paused = time.perf_counter()
        found = acceptance_length(measured(engine)["stream"])
        results["at"][str(count)] = {"stream": found.value, "error": found.error}
        aside += time.perf_counter() - paused
        print(f"{count} requests: {found.value:.3f} of {aim:.3f}, generation {hook.served.generation}", flush=True)
        point = {"requests": count, "seconds": time.perf_counter() - began - aside}
        in_a_row = [*in_a_row, point] if found.value >= aim else []
        if len(in_a_row) == REACHED_IN_A_ROW:
            results["reached"] = in_a_row[0]
            break
        if count >= args.marks[-1] or time.perf_counter() > deadline:
            break
        count += len(serve(engine, until(deadline, endless, args.day0_every), args.users, args.tokens, rate=args.rate))
    results["stats"] = hook.stats()
    hook.close()
    return results


def probe(setting: Setting) -> dict[str, Any]:
    """The shipped drafter's acceptance length by kind of prompt, to find streams unlike its training data."""
    args = setting.args
    engine = setting.plain(setting.drafter)
    found = {}
    for kind in args.kinds:
        if args.toy:
            some = toy_prompts("tell", args.held_out, 1)
        else:
            some = list(setting.encode(itertools.islice(prompts([kind], args.seed), args.held_out)))
        found[kind] = acceptance_length(counts_of(serve(engine, iter(some), args.users, args.tokens))).value
        print(kind, f"{found[kind]:.3f}", flush=True)
    return found


def everything(setting: Setting, write: Any) -> dict[str, Any]:
    """Runs all parts. Each has a part of `--max-seconds`; its results are written when it ends."""
    args, results = setting.args, {}
    parts = {
        "stream_data": (0.3, lambda deadline: stream(setting, kinds=None, deadline=deadline)),
        "stream_made": (0.3, lambda deadline: stream(setting, kinds=args.kinds, deadline=deadline)),
        "day0": (0.2, lambda deadline: day_zero(setting, deadline=deadline)),
        "cost": (0.2, lambda _: cost(setting)),
    }
    for name, (share, run) in parts.items():
        began = time.perf_counter()
        # The deadline is for serving; the rest of the time is for the part's start and its offline run.
        results[name] = run(began + 0.6 * share * args.max_seconds)
        results[name]["part_seconds"] = time.perf_counter() - began
        if "curve" in results[name]:
            draw(results[name], args.output.with_name(f"{args.output.stem}-{name}.png"))
        write(results)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("all", "stream", "cost", "day0", "probe"))
    parser.add_argument("--output", type=Path, default=Path("learn.json"))
    parser.add_argument("--data", type=Path, help="folder of prompts; without it a stream is generated from --kinds")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), help="kinds of prompts in the generated stream")
    parser.add_argument("--unique", type=int, default=6000, help="prompts of a stream before it repeats")
    parser.add_argument("--replay-step", type=int, default=97, help="every n-th of the training prompts may be replayed")
    parser.add_argument("--fixed", type=int, default=256, help="prompts of the fixed set")
    parser.add_argument("--marks", type=int, nargs="+", default=[1000, 5000, 20000])
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--rate", type=float, default=80.0, help="requests per second; 0: a closed loop of users")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--budget", type=float, default=5.0)
    parser.add_argument("--learning-rate", type=float, default=LearnConfig.learning_rate)
    parser.add_argument("--offline-epochs", type=int, default=3)
    parser.add_argument(
        "--offline-rate", type=float, default=2e-4, help="learning rate of the offline run, which falls to zero"
    )
    parser.add_argument("--cost-users", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--cost-seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--day0-every", type=int, default=500)
    parser.add_argument("--max-seconds", type=float, default=1400.0, help="for all parts together")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args(arguments)
    if args.what in ("all", "day0") and not args.toy and args.data is None:
        parser.error(f"{args.what} needs --data")
    is_made = args.kinds is not None or args.data is None
    args.kinds = args.kinds or ["german", "spanish", "french"]
    named = {name: str(value) for name, value in vars(args).items()}
    about = {"provenance": provenance([named]), "arguments": named}

    def write(results: dict[str, Any]) -> None:
        write_json(args.output, {**about, **results})

    setting, deadline = Setting(args), time.perf_counter() + args.max_seconds
    if args.what == "all":
        return everything(setting, write)
    if args.what == "stream":
        results = stream(setting, kinds=args.kinds if is_made else None, deadline=deadline)
        draw(results, args.output.with_suffix(".png"))
    elif args.what == "day0":
        results = day_zero(setting, deadline=deadline)
    else:
        results = {"cost": cost, "probe": probe}[args.what](setting)
    write(results)
    return results


if __name__ == "__main__":
    main()
