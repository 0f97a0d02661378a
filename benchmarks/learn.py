"""What `fledge serve --learn` is worth and costs, on one device.

    python benchmarks/learn.py stream --data DIR/stream/code.jsonl.gz --old DIR/eval --replay DIR/train --output learn-code.json
    python benchmarks/learn.py stream --kinds german spanish french …    the self-made stream of `learn_stream.py`
    python benchmarks/learn.py cost                                      tokens/s and inter-token latency, with and without
    python benchmarks/learn.py day0 --data DIR/train/prompts.jsonl.gz    no drafter at first, against the shipped one
    python benchmarks/learn.py probe --kinds german json                 the shipped drafter's acceptance, kind by kind

`stream`: acceptance length at depth 5 on held-out prompts of the stream and on old sets, before and after some thousands of
requests, against the frozen drafter and against one trained offline on the same answers. Held-out prompts are served with
learning switched off. `--toy`: a toy target on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import copy
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
from learn_stream import KINDS, prompts

from fledge import sources
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.drafters import default_drafter
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
from fledge.training.targets import toy

MODEL = "smollm2-135m"


class Setting:
    """Target, drafter and how prompts become tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer: Tokenizer | None = None
        # Two engines may share the device: neither takes all of its memory.
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
        return engine

    def plain(self, drafter: EagleDrafter | None, *, fixed: bool = True) -> Engine:
        engine = build_engine(copy.deepcopy(self.decoder), self.speculation(drafter, fixed=fixed), self.config)
        engine.warm_up()
        return engine


def read_prompts(path: Path) -> list[str]:
    """First turns of a JSONL file, packed or not."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()  # of bytes: texts hold U+2028
    return [json.loads(line)["turns"][0] for line in lines]


def apart(path: Path, count: int) -> tuple[list[str], list[str]]:
    """The first prompts of a file, and the others that ask for none of the same tasks: `92` in MBJP/92 and MBKP/92, the same
    function in two programming languages."""
    with gzip.open(path, "rt") as file:
        items = [(one["id"].rpartition("/")[2], one["turns"][0]) for one in map(json.loads, file)]
    tasks = {task for task, _ in items[:count]}
    return [text for _, text in items[:count]], [text for task, text in items[count:] if task not in tasks]


def toy_prompts(kind: str, count: int, seed: int) -> list[list[int]]:
    draw, found = random.Random(seed), []
    while len(found) < count:
        prompt, _ = toy.conversation(draw)
        if toy.WORDS[prompt[1]] == kind:
            found.append(prompt)
    return found


def serve(
    engine: Engine, prompts: Iterable[Sequence[int]], users: int, max_tokens: int, *, rate: float = 0.0, learn: bool = True
) -> list[Request]:
    """A closed loop of users; with a `rate`, requests arrive by chance, so many a second, whatever runs."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    waiting, done = iter(prompts), []
    draw, due, is_left = random.Random(0), time.perf_counter(), True
    while is_left or engine.has_unfinished():
        while is_left and len(engine.requests) < users and (not rate or time.perf_counter() >= due):
            if (prompt := next(waiting, None)) is None:
                is_left = False
                break
            done.append(engine.add_request(prompt, params, learn=learn))
            due += draw.expovariate(rate) if rate else 0.0
        if engine.has_unfinished():
            engine.step()
        elif is_left and not engine.idle():
            time.sleep(max(0.0, min(due - time.perf_counter(), 0.001)))
    return done


def acceptance(requests: Sequence[Request]) -> float:
    return 1 + sum(r.stats.accepted for r in requests) / max(1, sum(r.stats.steps for r in requests))


class Measured:
    """Acceptance length on held-out prompts and on old sets, with learning switched off."""

    def __init__(self, setting: Setting, held_out: Sequence[Sequence[int]], old: dict[str, list[list[int]]]) -> None:
        self.sets = {"stream": held_out, **old}
        self.users, self.tokens = setting.args.users, setting.args.tokens

    def __call__(self, engine: Engine) -> dict[str, float]:
        hook, engine.hook = engine.hook, None
        found = {
            name: acceptance(serve(engine, some, self.users, self.tokens, learn=False)) for name, some in self.sets.items()
        }
        engine.hook = hook
        old = [value for name, value in found.items() if name != "stream"]
        return found | ({"old": statistics.mean(old)} if old else {})


def stream(setting: Setting) -> dict[str, Any]:
    args = setting.args
    fixed: list[list[int]] = []
    old: dict[str, list[list[int]]] = {}
    if args.toy:
        all_prompts = list(dict.fromkeys(map(tuple, toy_prompts("tell", 4 * args.held_out, 1))))
        held_out, served = all_prompts[: args.held_out], all_prompts[args.held_out :]
        fixed, old = toy_prompts("count", 12, 2), {"count": toy_prompts("count", 8, 3)}
    else:
        if args.data:
            first, others = apart(args.data, args.held_out)
        else:
            texts = list(itertools.islice(prompts(args.kinds, args.seed), args.unique))
            first, others = texts[: args.held_out], texts[args.held_out :]
        held_out, served = list(setting.encode(first)), list(setting.encode(others))
        if args.replay:
            fixed = list(itertools.islice(setting.encode(read_prompts(args.replay)[:: args.replay_step]), args.fixed))
        if args.old:
            old = {path.stem: list(setting.encode(read_prompts(path))) for path in sorted(args.old.glob("*.jsonl"))}
    measured = Measured(setting, held_out, old)
    engine = setting.learning(setting.drafter, fixed)
    hook = engine.hook
    assert isinstance(hook, Learning)
    if args.toy:
        engine.drafter.fallback = None
    results: dict[str, Any] = {"at": {"0": measured(engine)}}
    print("0 requests:", results["at"]["0"], flush=True)
    first = hook.learner.serving
    answers: dict[tuple[int, ...], Sample] = {}
    endless, count, began = itertools.cycle(served), 0, time.perf_counter()
    for mark in args.marks:
        done = serve(engine, itertools.islice(endless, mark - count), args.users, args.tokens, rate=args.rate)
        count = mark
        answers |= {tuple(r.prompt): Sample(list(r.tokens), len(r.prompt)) for r in done if r.num_answer > 1}
        results["at"][str(mark)] = measured(engine)
        results.setdefault("stats", {})[str(mark)] = hook.stats() | {"seconds": time.perf_counter() - began}
        counts, spent = hook.learner.counts, hook.budget.spent
        print(
            f"{mark} requests:", results["at"][str(mark)], f"generation {hook.learner.generation} of {counts.candidates}, "
            f"{counts.steps} steps, {spent.learning:.1f} s of {spent.serving:.0f} s and {spent.idle:.1f} idle", flush=True,
        )  # fmt: skip
        if args.output:
            write_json(args.output.with_suffix(".partial"), results | {"events": list(hook.journal.events)})
    results |= {"curve": list(hook.journal.curve), "events": list(hook.journal.events)}
    before, after = results["at"]["0"], results["at"][str(args.marks[-1])]
    results["gain"] = after["stream"] / before["stream"] - 1
    if "old" in before:
        results["old_change"] = after["old"] / before["old"] - 1
    if args.offline_epochs:
        began = time.perf_counter()
        trained = offline(hook, first, list(answers.values()), args)
        offline_engine = setting.plain(trained)
        results["offline"] = measured(offline_engine) | {"seconds": time.perf_counter() - began}
        print("offline:", results["offline"], flush=True)
    hook.close()
    draw(results, args.output.with_suffix(".png"))
    return results


def offline(hook: Learning, first: dict[str, torch.Tensor], samples: list[Sample], args: argparse.Namespace) -> EagleDrafter:
    """The first weights trained by the learner's steps on all answers of the stream, for epochs: what there was to gain."""
    learner = hook.learner
    learner._start_over(args.offline_rate)
    learner.load(first)
    room = learner.config.batch_tokens
    batches: list[list[Sample]] = []
    for epoch in range(args.offline_epochs):
        mixed = random.Random(epoch).sample(samples, len(samples))
        batch: list[Sample] = []
        for one in [*mixed, *learner.fixed.replay]:
            one.tokens = one.tokens[:room]
            if sum(len(other.tokens) for other in batch) + len(one.tokens) > room:
                batches.append(batch)
                batch = []
            batch.append(one)
        batches.append(batch)
    for number, batch in enumerate(batches):
        list(learner._read_missing(batch))
        learner.learning_rate = args.offline_rate * learning_rate_factor((number + 1) / len(batches), "cosine", 0.02)
        learner._train(batch)
        if len(samples) * 200 > hook.ring.max_tokens:  # more than memory is meant for: read again in the next epoch
            for one in batch:
                one.text = None
    trained = EagleDrafter(learner.master.config)
    trained.load_state_dict({name: value.detach().cpu() for name, value in learner.master.state_dict().items()})
    return trained


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    marks = sorted(int(mark) for mark in results["at"])
    figure, axis = plt.subplots(figsize=(8, 4))
    curve = results["curve"]
    live = [point["acceptance_length"] for point in curve]
    axis.plot([point["requests"] for point in curve], live, color="#b9d8c6", linewidth=1, label="live")
    held_out = [results["at"][str(mark)]["stream"] for mark in marks]
    axis.plot(marks, held_out, color="#1f7a4d", marker="o", label="held-out requests")
    if all("old" in results["at"][str(mark)] for mark in marks):
        old = [results["at"][str(mark)]["old"] for mark in marks]
        axis.plot(marks, old, color="#5a6fa8", marker="s", label="old sets")
    axis.axhline(held_out[0], color="#8a94a0", linestyle="--", label="frozen drafter")
    if "offline" in results:
        axis.axhline(results["offline"]["stream"], color="#b3261e", linestyle=":", label="trained offline on the stream")
    for event in results["events"]:
        if event["event"] == "swap":
            axis.axvline(event["requests"], color="#dcdfd8", linewidth=0.7, zorder=0)
    axis.set_xlabel("requests served (grey lines: swaps)")
    axis.set_ylabel("acceptance length")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def cost(setting: Setting) -> dict[str, Any]:
    """Closed loops of users on the same prompts, with and without learning, in turn; inter-token times of all requests."""
    args, results = setting.args, {}
    if args.toy:
        served = toy_prompts("tell", 64, 1)
    else:
        texts = read_prompts(args.data) if args.data else itertools.islice(prompts(args.kinds, args.seed), 512)
        served = list(setting.encode(texts))
    engines = {
        "without": setting.plain(setting.drafter, fixed=False),
        "with": setting.learning(setting.drafter, served[:8], fixed=False, memory_mb=512 if not args.toy else None),
    }
    device = torch.device(engines["with"].config.device)
    for users in args.cost_users:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for number in range(args.rounds):
            order = list(engines) if number % 2 else list(engines)[::-1]
            for name in order:
                runs[name].append(timed_loop(engines[name], served, users, args))
        found = {name: {key: statistics.median(run[key] for run in some) for key in some[0]} for name, some in runs.items()}
        found["tokens_per_s_ratio"] = found["with"]["tokens_per_s"] / found["without"]["tokens_per_s"]
        found["p99_ratio"] = found["with"]["p99_ms"] / max(found["without"]["p99_ms"], 1e-9)
        results[str(users)] = found
        print(users, "users:", json.dumps(found), flush=True)
    hook = engines["with"].hook
    assert isinstance(hook, Learning)
    spent = hook.budget.spent
    results["share_of_time"] = spent.learning / max(spent.serving, 1e-9)
    results["announced_bytes"] = hook.num_bytes
    if device.type == "cuda":
        results["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    results["stats"] = hook.stats()
    return results


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


def day_zero(setting: Setting) -> dict[str, Any]:
    """From the target's last layer until 80 % of the shipped drafter's acceptance on the same held-out prompts."""
    args = setting.args
    if args.toy:
        all_prompts = toy_prompts("tell", 256, 1)
        held_out, served, aim = all_prompts[:16], all_prompts[16:], 1.5
    else:
        tokens = list(itertools.islice(setting.encode(read_prompts(args.data)), args.unique))
        held_out, served = tokens[: args.held_out], tokens[args.held_out :]
        reference = setting.plain(setting.drafter)
        aim = 0.8 * acceptance(serve(reference, held_out, args.users, args.tokens))
        del reference
    engine = setting.learning(None, [])
    hook = engine.hook
    assert isinstance(hook, Learning)
    measured = Measured(setting, held_out, {})
    results: dict[str, Any] = {"aim": aim, "at": {"0": measured(engine)}, "reached": None}
    endless, count, began, aside = itertools.cycle(served), 0, time.perf_counter(), 0.0
    while count < args.marks[-1] and time.perf_counter() - began < args.max_seconds:
        serve(engine, itertools.islice(endless, args.day0_every), args.users, args.tokens, rate=args.rate)
        count += args.day0_every
        paused = time.perf_counter()
        found = results["at"][str(count)] = measured(engine)
        aside += time.perf_counter() - paused
        print(f"{count} requests: {found['stream']:.3f} of {aim:.3f}, generation {hook.learner.generation}", flush=True)
        if found["stream"] >= aim and results["reached"] is None:
            results["reached"] = {"requests": count, "seconds": time.perf_counter() - began - aside}
            break
    results["stats"] = hook.stats()
    hook.close()
    return results


def probe(setting: Setting) -> dict[str, Any]:
    """The shipped drafter's acceptance length by kind of prompt: which stream is a shift."""
    args = setting.args
    engine = setting.plain(setting.drafter)
    found = {}
    for kind in args.kinds:
        some = list(setting.encode(itertools.islice(prompts([kind], args.seed), args.held_out)))
        found[kind] = acceptance(serve(engine, some, args.users, args.tokens))
        print(kind, f"{found[kind]:.3f}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stream", "cost", "day0", "probe"))
    parser.add_argument("--output", type=Path, default=Path("learn.json"))
    parser.add_argument("--data", type=Path, help="JSONL prompts of the stream; without it: --kinds")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=["german", "spanish", "french"])
    parser.add_argument("--unique", type=int, default=6000, help="prompts of a self-made stream before it repeats")
    parser.add_argument("--old", type=Path, help="folder of JSONL sets that must not get worse")
    parser.add_argument("--replay", type=Path, help="JSONL prompts of the fixed set")
    parser.add_argument("--replay-step", type=int, default=97, help="every n-th of them")
    parser.add_argument("--fixed", type=int, default=256, help="prompts of the fixed set")
    parser.add_argument("--marks", type=int, nargs="+", default=[1000, 5000, 20000])
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: a closed loop of users")
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
    parser.add_argument("--max-seconds", type=float, default=480.0, help="of day0")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args(arguments)
    work = {"stream": stream, "cost": cost, "day0": day_zero, "probe": probe}[args.what]
    results = work(Setting(args))
    named = {name: str(value) for name, value in vars(args).items()}
    write_json(args.output, {"provenance": provenance([named]), "arguments": named, **results})
    return results


if __name__ == "__main__":
    main()
