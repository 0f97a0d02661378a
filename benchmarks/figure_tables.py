"""Figures for the README, CPUs, acceptance and the server: each function makes Markdown from result files."""

from __future__ import annotations

import json
import re
import statistics
import sys
from typing import Any

from benchmarks.figure_blocks import (
    RESULTS,
    figures,
    gpu_speeds,
    load,
    megabytes,
    number,
    origin,
    percent,
    source,
    table,
    times,
)
from fledge.serving.foreign_flags import LLAMA_CPP, SGLANG

ROOT = RESULTS.parents[1]

# One table for the README.


def serving(name: str, users: int) -> dict[str, Any]:
    runs = load("serving-cpu")["results"]
    return next(run for run in runs if run["name"] == name and run["concurrency"] == users)


@figures("results")
def results() -> str:
    """CPU rows count tokens after the first, as `fledge bench` does; GPU rows the whole run, since only that was recorded."""
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
            f"vLLM {number(both[0]['per_user_tokens_per_second'])}",
            *(run["per_user_tokens_per_second"] for run in both[1:]),
        ],
    ]
    for users, value in plain.items():
        who = "1 user" if users == "1" else f"{users} users"
        name = f"H200, bf16, {who} ²"
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


TEXTS = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt-bench": "MT-bench", "demo": "the demo's prompts and two more"}


@figures("cpu-texts")
def cpu_texts() -> str:
    rows, parted = [], []
    for suffix, name in TEXTS.items():
        found = load(f"texts-vs-llamacpp-qwen2.5-coder-0.5b-{suffix}")
        rows.append([name, f"{found['equal']} of {found['of']}", f"{found['llamacpp_with_itself']} of {found['of']}"])
        for one in found["answers"]:
            if not one["equal"]:
                ours, theirs = (f"{gap:+.2f}" for gap in one["logit_gaps"])
                words = " / ".join(json.dumps(word, ensure_ascii=False) for word in one["candidates"])
                parted.append([name, f"after {one['tokens']} tokens", words, ours, theirs])
    tokens = found["tokens"]
    equal = table([f"Qwen2.5-Coder-0.5B Q4_K_M, {tokens} tokens", "Fledge = llama.cpp", "llama.cpp = itself"], rows)
    return equal + "\n\n" + table(["they diverge in", "", "Fledge / llama.cpp", "logit gap in Fledge", "in llama.cpp"], parted)


@figures("cpu-demo")
def cpu_demo() -> str:
    found = load("demo-cpu")
    runs = found.get("runs") or [found["summary"]]
    each = [[run[key] for run in runs] for key in ("plain_tokens_per_second", "speculative_tokens_per_second")]
    spans = [f"{number(min(values))}–{number(max(values))}" if len(runs) > 1 else number(values[0]) for values in each]
    speed, ups = found["summary"], [run["speed_up"] for run in runs]
    same = "identical" if found["summary"]["identical"] else "NOT identical"
    return (
        f"`fledge demo` ({source('demo-cpu')}; weights: {found.get('weights', found['dtype'])}; {len(runs)} runs): "
        f"{spans[0]} tokens/s plain, {spans[1]} with the drafter, speed-up {times(min(ups))}–{times(max(ups))}, median "
        f"{times(statistics.median(ups))}, "
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
        label = "--dtype float16" if name == "none" else f"--quantization {name}"
        rows.append([f"`{label}`", megabytes(run["weight_bytes"]), plain, speedup, same])
    return table(["flag", "weights", "plain tokens/s", "with the drafter", "same token as float16"], rows)


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
    behind = [f"tokens/s at {int(length):,} tokens of context" for length in speed]
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


@figures("drafter-storage")
def drafter_storage() -> str:
    found = load("drafter-storage-smollm2-135m")["drafters"]
    labels = {"bf16": "bf16", "int8": "8 bits, groups of 32", "int8-per-row": "8 bits, a scale per output"}
    rows = []
    for name, label in labels.items():
        runs = found[name]["humaneval"]["all"]
        row: list[object] = [label, *(f"{runs[depth]['acceptance_length']:.2f}" for depth in ("3", "5", "7"))]
        if name == "bf16":
            row.append("")
        else:
            over = runs["5"]["over"]["bf16"]
            row.append(f"{100 * (over['value'] - 1):+.1f} ± {100 * over['error']:.1f} %")
        rows.append(row)
    return table(["stored as", "depth 3", "depth 5", "depth 7", "over bf16, depth 5"], rows)


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
    tokens = f"after {long['context']['tokens']:,} tokens of context"
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
        for engine in ("Fledge auto", "Fledge before auto", "Fledge float32", "Fledge before float32", "vLLM float32"):
            spec, plain = (serving(f"{engine}, {how}", users)["tokens_per_second"] for how in ("EAGLE 3.1", "plain"))
            row.append(f"{number(plain, 0)} / {number(spec, 0)}")
        rows.append(row)
    found = load("serving-cpu")
    before = f"`{found['before'][:7]}`"
    titles = ["Fledge, its default", f"{before}, its default", "Fledge, float32", f"{before}, float32"]
    return table(["users", *titles, f"vLLM {found['vllm']}, float32"], rows)


@figures("serving-load")
def serving_load() -> str:
    found = load("serving-load")
    asked = sum(found["outcomes"].values())
    return (
        f"{found['clients']} clients for {found['seconds']:.0f} s: {asked:,} requests, {found['outcomes']['left']} of them "
        f"hung up early, {found['outcomes']['bad 400']} were malformed and got a 400, all others were answered. "
        f"Memory grew by {found['memory_growth_mib']:.0f} MiB ({source('serving-load')})."
    )


@figures("learn-soak")
def learn_soak() -> str:
    found = load("learn-soak-cpu")
    asked, failed = sum(found["outcomes"].values()), sum(n for code, n in found["outcomes"].items() if code != "200")
    return (
        f"`make soak-learn`, a toy on {found['provenance']['device']}: {found['clients']} clients for "
        f"{found['seconds'] / 60:.0f} minutes, {asked:,} requests, {failed} failed, "
        f"{found['fledge:learn_swaps_total']:.0f} swaps under load. "
        f"Memory grew by {found['memory_growth_mib']:.0f} MiB ({source('learn-soak-cpu')})."
    )


@figures("conform")
def conform() -> str:
    rows = []
    for name, title in (("conform-fledge", "Fledge"), ("conform-vllm", "vLLM 0.32, CPU build")):
        counts = load(name)["counts"]
        rows.append([title, counts["pass"], counts["fail"], counts["not supported"]])
    return table(["`fledge conform`", "pass", "fail", "not supported"], rows)


@figures("conform-vllm")
def conform_vllm() -> str:
    """The table of a conformance run: one row per scenario, one column per check."""
    found = load("conform-vllm")
    checks = ("valid", "streamed = whole", "again = first", "under load = alone", "with = without")
    marks = {"pass": "✓", "fail": "✗", "not supported": "–"}
    rows = [row for row in found["rows"] if row["check"] in checks]
    grid = {(row["scenario"], row["check"]): marks[row["status"]] for row in rows}
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    lines = table(["scenario", *checks], [[name, *(grid.get((name, check), "") for check in checks)] for name in names])
    counts, settings = found["counts"], found["settings"]
    return (
        f"{settings['prompts']} prompts of each kind, up to {settings['max_tokens']} tokens, {settings['users']} at a time "
        f"under load: {counts['pass']} pass, {counts['fail']} fail, {counts['not supported']} not supported.\n\n{lines}"
    )


# `fledge doctor`.


def doctor(name: str) -> str:
    """The output of `fledge doctor`: the drafter unchanged and repaired, and the verdict."""
    run = load("doctor-examples")["runs"][name]
    tried = [(words, run[words]) for words in ("unchanged", "repaired") if run[words]]
    rows = [[words, f"{trial['accepted']:.2f}", percent(trial["first"], 1)] for words, trial in tried]
    verdict = f"**{run['fault'] or 'healthy'}**: {run['explanation']}"
    what_to_do = f"  \n> **what to do**: {run['remedy']}" if run["fault"] else ""
    return f"{table(['drafter', 'accepted per step', 'first token accepted'], rows)}\n\n> {verdict}{what_to_do}"


figures("doctor-healthy")(lambda: doctor("as it is"))
figures("doctor-layers")(lambda: doctor("wrong layers"))
figures("doctor-flag")(lambda: doctor("wrong flag"))


@figures("doctor-off-by-one")
def doctor_off_by_one() -> str:
    run = load("doctor-examples")["runs"]["layers off by one"]
    verdict = f"calls {run['fault']}" if run["fault"] else "calls healthy"
    return f"{run['unchanged']['accepted']:.2f} accepted a step, which `doctor` {verdict}"


@figures("limits")
def limits() -> str:
    """The server's limits (not measured). Written into the page, because it is also read outside the built site."""
    sys.path.insert(0, str(ROOT / "docs"))
    import references

    return references.limits()


def flag_table(engine: str, flags: dict[str, str]) -> str:
    """Another engine's flags and Fledge's equivalents (not measured), from the table that the error messages use."""
    names: dict[str, list[str]] = {}
    for name, here in flags.items():
        names.setdefault(re.sub(r"(?<![\w-])(--[a-z][\w-]+(?: vllm| cuda)?)", r"`\1`", here), []).append(f"`{name}`")
    return table([engine, "Fledge"], [[", ".join(theirs), here] for here, theirs in names.items()]).replace("---:", "---")


figures("flags-sglang")(lambda: flag_table("SGLang", SGLANG))
figures("flags-llama-cpp")(lambda: flag_table("llama.cpp", LLAMA_CPP))


# Files and lines at commit 7ab0b39, which had three request loops.
EARLIER = {"engine": (34, 4364), "speculation": (11, 1000), "models": (5, 498), "ops": None, "kernels": (30, 5765)}


@figures("lines")
def lines() -> str:
    """The size of folders (not measured). Lines are rounded to hundreds, so that few commits change the table."""
    rows: list[list[object]] = []
    for folder, before in EARLIER.items():
        files = [path for path in (ROOT / "fledge" / folder).rglob("*") if path.suffix in (".py", ".c", ".h")]
        now = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        then = (before[0], f"{before[1] / 1000:.1f}k") if before else (None, None)
        rows.append([folder, then[0], len(files), then[1], f"{now / 1000:.1f}k"])
    return table(["folder", "files then", "now", "lines then", "now"], rows)


@figures("parity")
def parity() -> str:
    result = load("parity-cpu")
    rows = [
        (
            name,
            f"{row['fp32']['logits']:.0e}",
            f"{row['fp32']['states']:.0e}",
            percent(row["bf16"]["logits"], 1),
            percent(row["bf16"]["states"], 1),
            number(row["engine"]["logprobs"], 4),
            *(f"{row['engine'][kind]} of {row['engine']['answers']}" for kind in ("EAGLE", "latent attention")),
        )
        for name, row in result["rows"].items()
    ]
    titles = ["one layer of", "logits, fp32", "states, fp32", "logits, bf16", "states, bf16", "engine's logprobs"]
    titles += ["same text with EAGLE", "with a latent-attention drafter"]
    return table(titles, rows)


@figures("outside-vocabulary")
def outside_vocabulary() -> str:
    """Mean acceptance lengths over the seeds, and the difference of the two choices with its standard error."""
    rows: list[list[object]] = []
    for row in load("outside-vocabulary-toy-cpu")["rows"]:
        for depth, difference in row["mask_minus_renormalise"].items():
            means = [statistics.mean(row["acceptance_length"][choice][depth]) for choice in ("mask", "renormalise")]
            rows.append(
                [
                    f"{row['draft_vocabulary']} tokens ({percent(row['coverage'], 1)} of the answers), depth {depth}",
                    *(f"{mean:.2f}" for mean in means),
                    f"{difference:+.2f} ± {row['standard_error'][depth]:.2f}",
                ]
            )
    return table(["draft vocabulary", "mask", "renormalise", "difference"], rows)
