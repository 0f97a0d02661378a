"""The tables and sentences of measured figures, each a function from result files to Markdown. `figures.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Table = Callable[[], str]
BLOCKS: dict[str, Table] = {}


@cache
def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def block(name: str) -> str:
    assert name in BLOCKS, f"no figures called {name!r}; there are {', '.join(sorted(BLOCKS))}"
    return BLOCKS[name]()


def figures(name: str) -> Callable[[Table], Table]:
    def register(function: Table) -> Table:
        BLOCKS[name] = function
        return function

    return register


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float, digits: int | None = None) -> str:
    """100 and more without decimals, less with as many as tell two runs apart."""
    if digits is None:
        digits = 0 if abs(value) >= 20 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def times(value: float) -> str:
    return f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f} MB"


def source(*names: str) -> str:
    """Where the figures are, relative to `benchmarks/README.md`; other pages use `cite`."""
    return ", ".join(f"[`{name}.json`](results/{name}.json)" for name in names)


def origin(result: dict[str, Any]) -> str:
    run = result["provenance"]
    return f"{run['device']}, commit `{run['commit']}`, torch {run['torch']}"


# One table for the README.


def serving(name: str, users: int) -> dict[str, Any]:
    runs = load("serving-cpu")["results"]
    return next(run for run in runs if run["name"] == name and run["concurrency"] == users)


def gpu_speeds() -> tuple[dict[str, float], dict[str, float]]:
    """Tokens/s per user by users, without and with the drafter, of the kernels that are in the tree."""
    speed = load("exact-h200")["speed, end tokens ignored"]
    plain = {users: run["tokens_per_s_per_user"] for users, run in speed["plain"].items()}
    spec = speed["spec (copied from the printed output)"]
    drafted = {name.split(",")[0]: run["tokens_per_s_per_user"] for name, run in spec.items() if name.endswith("chosen")}
    return plain, {users: float(value) for users, value in drafted.items()}


@figures("results")
def results() -> str:
    cpu, vllm = load("cpu-vs-llamacpp-smollm2-135m")["rows"], load("gpu-h200")["vllm_earlier"]
    plain, drafted = gpu_speeds()
    both = [serving(f"{engine} float32, {how}", 1) for engine in ("vLLM", "Fledge") for how in ("plain", "EAGLE 3.1")]
    rows: list[list[object]] = [
        [
            "2 CPU cores, 4-bit GGUF",
            f"llama.cpp {number(cpu['llama.cpp']['tokens_per_second'])}",
            None,
            cpu["Fledge, plain"]["tokens_per_second"],
            cpu["Fledge, drafter"]["tokens_per_second"],
        ],
        [
            "2 CPU cores, float32 ¹",
            f"vLLM {number(both[0]['tokens_per_second'])}",
            *(run["tokens_per_second"] for run in both[1:]),
        ],
    ]
    for users, value in plain.items():
        who = "1 user" if users == "1" else f"{users} users"
        name = f"H200, bf16, {who}" + (" ²" if users == "1" else "")
        rows.append([name, f"vLLM {vllm['plain'][users]}", vllm["depth 3"][users], value, drafted.get(users)])
    return table(["SmolLM2-135M, tokens/s per user", "other engine", "with a drafter", "Fledge", "with its drafter"], rows)


@figures("cpu-headline")
def cpu_headline() -> str:
    rows = load("cpu-vs-llamacpp-smollm2-135m")["rows"]
    plain, drafted = (rows[name]["tokens_per_second"] for name in ("Fledge, plain", "Fledge, drafter"))
    return f"{number(plain)} tokens/s without the drafter, {number(drafted)} with it ({times(drafted / plain)})"


# CPU.


@figures("cpu-llamacpp")
def cpu_llamacpp() -> str:
    rows: list[list[object]] = []
    for path in sorted(RESULTS.glob("cpu-vs-llamacpp-*.json"), key=lambda path: ("smollm" not in path.name, path.name)):
        found = load(path.stem)
        base = found["rows"]["llama.cpp"]
        for engine, run in found["rows"].items():
            speed, prefill = run["tokens_per_second"], run["prefill_tokens_per_second"]
            ratio = "" if run is base else f" ({times(speed / base['tokens_per_second'])})"
            faster = "" if run is base else f" ({times(prefill / base['prefill_tokens_per_second'])})"
            name = f"llama.cpp (llama-cpp-python {run['version']})" if run is base else engine
            rows.append(
                [
                    f"`{found['settings']['file']}`" if run is base else "",
                    name,
                    number(speed) + ratio,
                    number(prefill) + faster,
                    megabytes(run["peak_bytes"]),
                    f"{run['ready_seconds']:.1f} s",
                ]
            )
    return table(["file", "engine", "tokens/s", "prefill tokens/s", "peak memory", "ready after"], rows)


@figures("cpu-llamacpp-how")
def cpu_llamacpp_how() -> str:
    files = []
    for path in sorted(RESULTS.glob("cpu-vs-llamacpp-*.json")):
        found, how = load(path.stem), load(path.stem)["settings"]
        files.append(
            f"- {source(path.stem)}: {how['prompts']} prompts, {how['tokens']} tokens each, prefill of {how['prefill']} "
            f"tokens, medians of {how['rounds']}, {how['threads']} threads; {origin(found)}."
        )
    return "\n".join(files)


@figures("cpu-demo")
def cpu_demo() -> str:
    found = load("demo-cpu")
    runs = found.get("runs") or [found["summary"]]
    each = [[run[key] for run in runs] for key in ("plain_tokens_per_second", "speculative_tokens_per_second")]
    spans = [f"{number(min(values))}–{number(max(values))}" if len(runs) > 1 else number(values[0]) for values in each]
    speed = found["summary"]
    same = "identical" if found["summary"]["identical"] else "NOT identical"
    return (
        f"`fledge demo` ({source('demo-cpu')}; {found['dtype']} weights, {len(runs)} run{'s' * (len(runs) > 1)}): "
        f"{spans[0]} tokens/s plain, {spans[1]} with the drafter, median speed-up {times(speed['speed_up'])}, "
        f"acceptance length {number(speed['acceptance_length'])}, output {same} on every prompt. {origin(found)}."
    )


@figures("cpu-transformers")
def cpu_transformers() -> str:
    found = load("cpu-vs-transformers")
    speed = found["tokens_per_second"]
    base = speed["transformers float32"]
    rows = [[name.replace(" (default)", ""), value, times(value / base)] for name, value in speed.items()]
    return table(["plain decoding, one prompt", "tokens/s", "over transformers"], rows)


@figures("cpu-quantization")
def cpu_quantization() -> str:
    rows = []
    for name, run in load("quantization-cpu")["results"].items():
        plain, drafted = run["tokens_per_second"]["plain"], run["tokens_per_second"]["speculative"]
        speedup = f"{number(drafted)} ({times(drafted / plain)})"
        same = "" if name == "none" else percent(run["same_choice_given_the_same_text"], 1)
        label = "none (float16)" if name == "none" else name
        rows.append([f"`{label}`", megabytes(run["weight_bytes"]), plain, speedup, same])
    return table(["`--quantization`", "weights", "plain tokens/s", "with the drafter", "same token as float16"], rows)


@figures("cpu-verify")
def cpu_verify() -> str:
    cost = load("verify-cost-cpu")["milliseconds"]
    rows = [[rows, f"{value:.1f} ms", times(value / cost["1"])] for rows, value in cost.items()]
    return table(["tokens in one pass", "time", "over one token"], rows)


@figures("cpu-kv-cache")
def cpu_kv_cache() -> str:
    speed, quality = load("kv-cache-cpu")["speed"], load("kv-cache-quality-cpu")["quality"]
    rows = []
    for name in next(iter(speed.values())):
        runs = [speed[length][name] for length in speed]
        same = quality.get(name)
        cells = [runs[0]["cache_bytes_per_token"], *(run["tokens_per_second"] for run in runs)]
        rows.append([f"`{name}`", *cells, same and percent(same["same_choice"], 1), same and f"{same['kl_divergence']:.1e}"])
    behind = [f"tokens/s behind {int(length):,} tokens" for length in speed]
    return table(["`--kv-cache-dtype`", "bytes a token", *behind, "same token as float32", "KL divergence"], rows)


# Acceptance.


@figures("acceptance")
def acceptance() -> str:
    found = load("acceptance-smollm2-135m")
    rows = []
    for data in ("humaneval", "gsm8k", "mt_bench"):
        row: list[object] = [data]
        for drafter, kind in (("eagle3.1", "all"), ("eagle3.1", "others"), ("eagle3", "all"), ("eagle3", "others")):
            runs = found["drafters"][drafter][data][kind]
            row.append(" / ".join(f"{runs[depth]['acceptance_length']:.2f}" for depth in ("3", "5", "7")))
        over = found["drafters"]["eagle3.1"][data]["all"]["5"]["over"]["eagle3"]
        row.append(f"{100 * (over['value'] - 1):+.1f} ± {100 * over['error']:.1f} %")
        rows.append(row)
    return table(["prompts", "EAGLE 3.1", "without loops", "EAGLE 3 twin", "without loops", "3.1 over 3, depth 5"], rows)


@figures("acceptance-headline")
def acceptance_headline() -> str:
    runs = load("acceptance-smollm2-135m")["drafters"]["eagle3.1"]
    lengths = [runs[data]["all"]["5"]["acceptance_length"] for data in runs]
    return f"{min(lengths):.1f} to {max(lengths):.1f}"


@figures("acceptance-context")
def acceptance_context() -> str:
    short, long = load("acceptance-context-short"), load("acceptance-context-6k")
    rows = []
    for data in ("humaneval", "gsm8k", "mt_bench"):
        cells: list[object] = [data]
        for found in (short, long):
            runs = found["drafters"]["smollm2-135m-eagle3.1"][data]
            cells += [f"{runs[kind]['5']['acceptance_length']:.2f}" for kind in ("all", "others")]
        rows.append(cells)
    tokens = f"behind {long['context']['tokens']:,} tokens"
    return table(["depth 5", "short prompt", "without loops", tokens, "without loops"], rows)


@figures("acceptance-vllm")
def acceptance_vllm() -> str:
    found = load("vllm-acceptance-smollm2-135m")
    rows = [
        [row["data"], f"{row['fledge']:.3f}", f"{row['vllm']:.3f}", f"{row['same_text']} of {row['prompts']}"]
        for row in found["rows"]
    ]
    return table([f"depth {found['depth']}", "Fledge", f"vLLM {found['vllm']}", "same text"], rows)


# The server.


@figures("serving-cpu")
def serving_cpu() -> str:
    rows = []
    for users in (1, 4, 16):
        row: list[object] = [users]
        for engine in ("Fledge float16", "Fledge float32", "vLLM float32"):
            spec, plain = (serving(f"{engine}, {how}", users)["tokens_per_second"] for how in ("EAGLE 3.1", "plain"))
            row.append(f"{number(plain, 0)} / {number(spec, 0)}")
        rows.append(row)
    return table(["users", "Fledge, float16", "Fledge, float32", f"vLLM {load('serving-cpu')['vllm']}, float32"], rows)


@figures("serving-load")
def serving_load() -> str:
    found = load("serving-load")
    asked = sum(found["outcomes"].values())
    return (
        f"{found['clients']} clients for {found['seconds']:.0f} s: {asked:,} requests, {found['outcomes']['left']} of them "
        f"hung up early, {found['outcomes']['bad 400']} were malformed and got a 400, all others were answered. "
        f"Memory grew by {found['memory_growth_mib']:.0f} MiB ({source('serving-load')})."
    )


# GPU.


@figures("gpu-speed")
def gpu_speed() -> str:
    plain, drafted = gpu_speeds()
    vllm = load("gpu-h200")["vllm_earlier"]
    rows = []
    for users, value in plain.items():
        spec = drafted.get(users)
        over = times(spec / value) if spec else None
        rows.append(
            [users, value, spec, over, vllm["plain"][users], times(value / vllm["plain"][users]), vllm["depth 3"][users]]
        )
    titles = ["users", "plain", "with the drafter", "over plain", "vLLM 0.22.0 plain", "Fledge over it", "vLLM with a drafter"]
    return table(titles, rows)


@figures("gpu-before")
def gpu_before() -> str:
    speed = load("one-engine-h200")["speed"]
    vllm = {(run["label"], run["concurrency"]): run["per_user"] for run in load("gpu-h200")["latest"]["vllm"]["runs"]}
    rows = []
    for users, run in speed["plain"].items():
        chosen, plain = speed["spec"][f"{users}, chosen"], run["tokens_per_s_per_user"]
        cells = [
            plain,
            chosen["tokens_per_s_per_user"],
            times(chosen["tokens_per_s_per_user"] / plain),
            chosen["acceptance_length"],
        ]
        rows.append([users, *cells, vllm["plain", int(users)], vllm["EAGLE, depth 3", int(users)]])
    titles = [
        "users",
        "plain",
        "with the drafter",
        "over plain",
        "acceptance length",
        "vLLM plain",
        "vLLM, same drafter, depth 3",
    ]
    return table(titles, rows)


@figures("gpu-steps")
def gpu_steps() -> str:
    before, now = (load(name) for name in ("one-engine-h200", "exact-h200"))
    after = now["speed, end tokens ignored"]["plain"]
    rows = [[users, run["step_us"], after[users]["step_us"]] for users, run in before["speed"]["plain"].items()]
    return table(["rows of a plain step", "before, µs", "exact kernels, µs"], rows)


@figures("gpu-1.5b")
def gpu_larger() -> str:
    steps = load("exact-h200")["1.5b steps"]
    rows = []
    for users in (1, 4, 16, 64, 256):
        plain, spec = steps.get(f"{users} rows, plain"), steps.get(f"{users} rows, depth 3")
        rows.append(
            [
                users,
                plain and plain["us"],
                plain and percent(plain["share"]),
                spec and spec["us"],
                spec and percent(spec["share"]),
            ]
        )
    return table(["rows", "plain step, µs", "of the roofline", "cycle of depth 3, µs", "of the roofline"], rows)


@figures("gpu-options")
def gpu_options() -> str:
    options = load("one-engine-h200")["options"]
    rows = []
    for name in ("sampled", "top-p 0.9", "logprobs 5", "penalties", "bias", "min_tokens 32"):
        cells = [options.get(f"{how}, {users} users, {name}") for how in ("plain", "depth 3") for users in (1, 16)]
        rows.append([name, *(run and f"{run.get('per_cycle', run['ratio']):.2f}" for run in cells)])
    return table(["option", "plain, 1 user", "plain, 16", "depth 3, 1 user", "depth 3, 16"], rows)


@figures("gpu-cycles")
def gpu_cycles() -> str:
    cycles = load("one-engine-h200")["cycles"]
    names = list(dict.fromkeys(name.rsplit(", ", 1)[0] for name in cycles))
    rows = [[name, *(cycles[f"{name}, {users} rows"]["replay_us"] for users in (1, 16))] for name in names]
    return table(["one cycle", "1 row, µs", "16 rows, µs"], rows)


@figures("gpu-more")
def gpu_more() -> str:
    found = load("gpu-h200")["latest"]
    queued = found["offline"]
    long = {name: run for name, run in found["long"].items() if name.endswith(" tokens")}
    rows = [
        [f"{int(name.split()[0]):,}", run["prompt_tokens_per_s"], run["plain_step_us"], run["cycle_us"]]
        for name, run in long.items()
    ]
    return (
        f"{queued['plain']['requests']:,} queued requests: {queued['plain']['tokens_per_s']:,.0f} tokens/s plain, "
        f"{queued['depth 3']['tokens_per_s']:,.0f} at depth 3.\n\n"
        + table(["tokens of context", "prefill tokens/s", "plain step, µs", "cycle of depth 3, µs"], rows)
    )


@figures("identity")
def identity() -> str:
    found = load("exact-h200")["identity"]
    cells = {
        kind: {name: f"{run['equal']} of {run['of']}" for name, run in found[kind].items()} for kind in ("greedy", "seeded")
    }
    return table(["", "greedy", "seeded"], [[name, cells["greedy"][name], cells["seeded"][name]] for name in cells["greedy"]])


# Training.


@figures("training")
def training() -> str:
    runs = load("training-throughput-h200")["runs"]
    rows = []
    for run in runs:
        if "unroll" in run["compiled"]:
            cells = [
                run["sequence"],
                run["tokens_per_second"],
                f"{run['peak_memory_gib']:.1f} GiB",
                percent(run["target_share"]),
            ]
            rows.append([cells[0], *cells[1:]])
    return table(["sequence length", "tokens/s", "peak memory", "time in the target"], rows)


@figures("regeneration")
def regeneration() -> str:
    found = load("regeneration-h200")
    rows = []
    for name, key in (("with the drafter, prompts of its own", "with_the_drafter"), ("plain, conversations", "end_to_end")):
        run = found[key]
        cells = [run["answer_tokens"], run["seconds"], run["answer_tokens_per_s"], run["answer_tokens_per_s_after_warm_up"]]
        rows.append([name, f"{cells[0] / 1e6:.1f} M", f"{cells[1]:.0f} s", *(number(value, 0) for value in cells[2:])])
    return table(["`fledge regenerate`", "answer tokens", "whole command", "tokens/s", "after start-up"], rows)


@figures("shipped-training")
def shipped_training() -> str:
    first, second = load("twins-h200"), load("arms-h200")
    rows = [
        [
            name,
            found["steps"],
            f"{found['tokens_seen'] / 1e6:.0f} M",
            f"{found['training_seconds']:.0f} s",
            f"{found['peak_memory_gib']:.1f} GiB",
        ]
        for name, found in (("first stage", first), ("second stage", second))
    ]
    return table(["both drafters side by side", "steps", "tokens seen", "time", "peak memory"], rows)


@figures("conform")
def conform() -> str:
    rows = []
    for name, title in (("conform-fledge", "Fledge"), ("conform-vllm", "vLLM 0.32, CPU build")):
        counts = load(name)["counts"]
        rows.append([title, counts["pass"], counts["fail"], counts["not supported"]])
    return table(["`fledge conform`", "pass", "fail", "not supported"], rows)


@figures("learning-rates")
def learning_rates() -> str:
    final = load("learning-rates-h200")["final"]
    names = {"5e-4": "AdamW, 5e-4", "15e-4": "AdamW, 1.5e-3"}
    rows = []
    for kind, label in (("a", ""), ("m", "Muon, 5e-4")):
        for rate in ("5e-4", "15e-4"):
            if f"{kind}31-{rate}" in final:
                lengths = [final[f"{kind}{version}-{rate}"]["acceptance_length"]["5"] for version in ("31", "3")]
                rows.append([label or names[rate], *(f"{length:.3f}" for length in lengths)])
    return table(["200 steps, acceptance length at depth 5", "EAGLE 3.1", "EAGLE 3"], rows)


@figures("exploration")
def exploration() -> str:
    found = load("exploration-h200")
    labels = {
        "base": "as it is (16,384 tokens, TTT 5)",
        "killed": "the same, killed and started again",
        "vocab8k": "draft vocabulary of 8,192",
        "ttt3": "three draft steps in training",
        "kl": "soft cross-entropy alone",
    }
    later = {
        "killed": "other answers (50,000), killed and resumed",
        "vocab32k": "… draft vocabulary of 32,768",
        "shared": "… the target's head and whole vocabulary",
    }
    rows: list[list[object]] = []
    for runs, words in ((found["runs"], labels), (found["later_runs"]["runs"], later)):
        for name, label in words.items():
            lengths = runs[name]["acceptance_length"]
            rows.append([label, *(f"{lengths[depth]:.2f}" for depth in ("3", "5", "7"))])
    return table(["recipe", "depth 3", "depth 5", "depth 7"], rows)


@figures("training-course")
def training_course() -> str:
    final = load("arms-h200")["final"]
    rows = []
    for name, label in (("eagle3.1", "EAGLE 3.1"), ("eagle3", "EAGLE 3")):
        run = final[name]
        lengths = " / ".join(f"{run['acceptance_length'][depth]:.2f}" for depth in ("3", "5", "7"))
        rows.append([label, lengths, f"{run['rms'][0]:.2f}", f"{run['rms'][-1]:.2f}", times(run["rms"][-1] / run["rms"][0])])
    return table(
        ["end of the second stage", "acceptance length, depth 3 / 5 / 7", "RMS of the state, step 1", "step 7", "growth"], rows
    )
