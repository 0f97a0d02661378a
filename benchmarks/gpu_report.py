"""A page and a picture of `gpu.py`'s figures.

    python benchmarks/gpu_report.py results.json [more.json …] --out report/gpu.md --picture report/gpu.png

Later files add stages to earlier ones; a stage that is in both is taken from the later one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    found: Figures = {}
    for path in args.results:
        found |= json.loads(path.read_text())
    sections = [
        speeds,
        whole_answers,
        microseconds,
        parts,
        libraries,
        tiles,
        forms,
        modes,
        options,
        guard,
        offline,
        long_context,
        checks,
    ]
    origin = found.get("provenance", {})
    where = f"{origin.get('device', 'GPU')}, torch {origin.get('torch', '?')}, commit {origin.get('commit', '?')}"
    head = f"# The engine on a GPU\n\n{where}; `{origin.get('command', '')}`. Written by `benchmarks/gpu_report.py`; "
    head += "every figure is in `benchmarks/results/`.\n"
    if found.get("note"):
        head += f"\n{found['note']}\n"
    text = [head, *(part for section in sections if (part := section(found)))]
    if args.picture and "plain" in found:
        draw(found, args.picture)
        text.insert(1, f"![tokens/s by users]({Path('images') / args.picture.name})\n")
    args.out.write_text("\n".join(text))


def table(titles: list[str], rows: list[list[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def vllm_speeds(found: Figures) -> tuple[dict[str, float], dict[str, float], str]:
    """Plain and drafted (at `vllm_depth`), per user, where it was measured too."""
    runs = found.get("vllm", {}).get("runs")
    if not runs:
        return {}, {}, "vLLM was not run"
    plain = {str(run["concurrency"]): run["per_user"] for run in runs if run["label"] == "plain"}
    at_depth = f"depth {vllm_depth(found)}"
    drafted = {str(run["concurrency"]): run["per_user"] for run in runs if run["label"].endswith(at_depth)}
    return plain, drafted, f"beside vLLM {found['vllm']['version']} on such a card"


def vllm_depth(found: Figures) -> str:
    labels = [run["label"] for run in found.get("vllm", {}).get("runs", ()) if run["label"] != "plain"]
    return labels[0].split()[-1] if labels else "3"


def best_depth(found: Figures, users: str) -> str | None:
    depths = [name for name in found.get("spec", {}) if name.startswith(f"{users}, depth ")]
    return max(depths, key=lambda name: found["spec"][name]["tokens_per_s"], default=None)


def speeds(found: Figures) -> str | None:
    if "plain" not in found:
        return None
    vllm_plain, vllm_drafted, source = vllm_speeds(found)
    rows = []
    for users, plain in found["plain"].items():
        best = best_depth(found, users)
        spec = found["spec"][best] if best else {}
        chosen = found.get("spec", {}).get(f"{users}, chosen", {})
        mine, drafted = plain["tokens_per_s_per_user"], spec.get("tokens_per_s_per_user")
        alike = found.get("spec", {}).get(f"{users}, depth {vllm_depth(found)}", {}).get("tokens_per_s_per_user")
        rows.append(
            [
                users,
                mine,
                vllm_plain.get(users),
                mine / vllm_plain[users] if users in vllm_plain else None,
                drafted,
                best.split()[-1] if best else None,
                chosen.get("tokens_per_s_per_user"),
                spec.get("acceptance_length"),
                spec.get("speed_up"),
                spec.get("overhead"),
                alike,
                vllm_drafted.get(users),
                alike / vllm_drafted[users] if alike and users in vllm_drafted else None,
            ]
        )
    titles = ["users", "plain", "vLLM plain", "×", "speculative", "depth", "depth chosen by load", "acceptance length"]
    titles += ["over plain", "overhead", f"at depth {vllm_depth(found)}", "vLLM at that depth", "×"]
    return f"## Tokens/s per user, prompts included\n\n({source})\n\n{table(titles, rows)}"


def whole_answers(found: Figures) -> str | None:
    if "end_tokens_ignored" not in found:
        return None
    runs, rows = found["end_tokens_ignored"], []
    for users, plain in runs["plain"].items():
        best = best_depth(runs, users)
        spec, chosen = runs["spec"][best], runs["spec"][f"{users}, chosen"]
        speeds = [run["tokens_per_s_per_user"] for run in (plain, spec, chosen)]
        rows.append([users, speeds[0], speeds[1], best.split()[-1], speeds[2], spec["acceptance_length"], spec["speed_up"]])
    text = f"## The same with end tokens ignored (commit {runs['provenance']['commit']})\n\nEvery answer has 256 tokens. "
    text += "Prompts weigh less; what comes after an answer's end is drafted for less well.\n\n"
    titles = ["users", "plain", "speculative", "depth", "depth chosen by load", "acceptance length", "over plain"]
    return text + table(titles, rows)


def microseconds(found: Figures) -> str | None:
    if "profile" not in found:
        return None
    profile = found["profile"]
    text = "## Where the microseconds go\n\nKernels one after the other (without overlap, so that each has its own time). "
    text += f"Floor: weights over bandwidth, {profile['floor_us']:.0f} µs.\n\n"
    for name, step in profile.items():
        if name == "floor_us":
            continue
        rows = [[kernel, times["launches"], times["us"]] for kernel, times in list(step["kernels"].items())[:8]]
        text += (
            f"### {name}: {step['step_us']:.0f} µs, {step['over_floor']:.1f}× the floor, {step['launches']:.0f} launches\n\n"
        )
        if overlapping := step_with_overlap(found, name):
            over = overlapping / profile["floor_us"]
            text += f"As it runs, the kernels overlapping: {overlapping:.0f} µs, {over:.1f}× the floor.\n\n"
        text += table(["kernel", "launches", "µs"], rows) + "\n"
    return text


def step_with_overlap(found: Figures, shape: str) -> float | None:
    """`shape`: batch 64, depth 3."""
    users, depth = (part.split()[-1] for part in shape.split(", "))
    step = found.get("plain", {}).get(users) if depth == "0" else found.get("spec", {}).get(f"{users}, depth {depth}")
    return step["step_us"] if step else None


def parts(found: Figures) -> str | None:
    if "parts" not in found:
        return None
    whole = found["parts"]["nothing"]
    names = [name for name in found["parts"] if name != "nothing"]
    rows = [[shape, us, *(us - found["parts"][name][shape] for name in names)] for shape, us in whole.items()]
    return "## What each part costs inside a step (µs)\n\n" + table(["", "step", *names], rows)


LIBRARIES = """## Own kernels beside the library's (µs)

One linear with its norm, SwiGLU or residual, in a chain over all layers' weights: ours, which is one kernel fed straight from
memory, / cuBLAS with elementwise kernels around it. Ours is used up to 128 rows, for gate_up up to 64. Attention over prompts
is PyTorch's flash attention; over the cache it is a kernel of ours, for the library's neither rotates nor stores the new keys.

"""


def libraries(found: Figures) -> str | None:
    """From `linears-h200.json`: the linears' own kernel beside the library's."""
    if "more_rows" not in found:
        return None
    by_rows = {count: dict(kinds) for count, kinds in found["more_rows"]["rows"].items()}
    for count, kinds in found["one_linear"].items():
        by_rows.setdefault(count, {name: {"direct": us.get("c16 w4", us.get("c16 w8")), **us} for name, us in kinds.items()})
    rows = []
    for count in sorted(by_rows, key=int):
        pairs = [(us.get("direct"), us["cublas"]) for us in by_rows[count].values()]
        rows.append([count, *(f"{'–' if direct is None else f'{direct:.1f}'} / {cublas:.1f}" for direct, cublas in pairs)])
    return LIBRARIES + table(["rows", *next(iter(by_rows.values()))], rows)


def tiles(found: Figures) -> str | None:
    """From `kernel-forms-h200.json`: what all linears of a pass take when one kind of them has another form."""
    if "tiles" not in found:
        return None
    rows = []
    for one in found["tiles"]["by_rows"]:

        def with_form(linear: str, tile: int, columns: int, one: Figures = one) -> float | None:
            wanted = {"tile": tile, "warps": 4, "columns": columns}
            forms = one["one_changed"][linear]
            return next((form["us"] for form in forms if wanted.items() <= form.items()), None)

        eight = next(form["us"] for form in one["all_changed"] if (form["tile"], form["warps"]) == (16, 8))
        rows.append([one["rows"], one["then_us"], with_form("gate", 32, 16), with_form("qkv", 16, 32), eight])
    text = (
        "## The linears' programs (µs a pass of all layers')\n\nA program has 16 rows and 16 outputs. Where those do not all "
    )
    text += "run at once they take turns: then gate_up takes 32 rows a program, and qkv 32 outputs.\n\n"
    return text + table(["rows", "16 × 16", "gate_up 32 × 16", "qkv 16 × 32", "all on 8 warps"], rows)


def forms(found: Figures) -> str | None:
    """From `kernel-forms-h200.json`: what a step takes by the form of the attention's programs."""
    if "steps" not in found:
        return None
    names = list(found["steps"][0]["us"])
    rows = [[f"rows: {one['rows']}, depth {one['depth']}", one["context"], *one["us"].values()] for one in found["steps"]]
    text = "## The attention's programs (µs a step)\n\nBy how many settled keys one has loaded before the queries are there; "
    text += "the rest comes block by block, or in shares. Where there are few programs, up to 16,384 keys, they begin with 512 "
    text += "now, on 8 warps. Other processes were at work on the card: single figures may be too high.\n\n"
    return text + table(["", "context", *names], rows)


def modes(found: Figures) -> str | None:
    if "modes" not in found:
        return None
    runs = {name: run for name, run in found["modes"].items() if isinstance(run, dict) and "weight_bytes" in run}
    if "bf16" not in runs:
        return None
    shapes = [name for name in runs["bf16"] if name != "weight_bytes"]
    rows = []
    for name, run in runs.items():
        speeds = [run.get(shape, {}).get("tokens_per_s") for shape in shapes]
        over = [speed and speed / runs["bf16"][shape]["tokens_per_s"] for speed, shape in zip(speeds, shapes, strict=True)]
        agreement = run.get("agreement", {})
        same = f"{agreement['next_token']:.1%}" if agreement else None
        rows.append([name, run["weight_bytes"] / 1e6, *speeds, *over, same, agreement.get("tokens_until_they_part")])
    titles = [
        "",
        "MB read a step",
        *(f"{shape} (users, depth)" for shape in shapes),
        *(f"over bf16, {shape}" for shape in shapes),
    ]
    text = "## Quantised targets\n\nTokens/s; how often the likeliest token is the one that bf16 says, given bf16's text; and "
    text += f"after how many of 128 tokens their own answers part. {found['modes'].get('note', '')}\n\n"
    return text + table([*titles, "same token", "tokens until they part"], rows)


def options(found: Figures) -> str | None:
    if "options" not in found:
        return None
    runs = found["options"]
    keys = ["tokens_per_s_per_user", "without", "ratio", "per_cycle", "acceptance_length"]
    speeds = [
        [way, name, *(figures[key] for key in keys)]
        for way, by_name in runs.items()
        if isinstance(by_name, dict) and way != "cycles"
        for name, figures in by_name.items()
    ]
    text = (
        "## Sampling options\n\nTokens/s per user with an option, and of the same requests without it. `per cycle`: the ratio "
    )
    text += f"at equal acceptance length. JSON-like mask: {runs['mask']}. Mixed: every request has another option.\n\n"
    text += table(["", "option", "with it", "without", "ratio", "per cycle", "acceptance length"], speeds)
    cycles = [[name, *(run[key] for key in ("replay_us", "as_run_us", "captured"))] for name, run in runs["cycles"].items()]
    text += (
        "\n## Cycles by drafting method (µs)\n\nReplays on the device with all rows running, and wall clock of the engine's "
    )
    return text + "loop.\n\n" + table(["", "replay", "as run", "captured"], cycles)


def guard(found: Figures) -> str | None:
    if "guard" not in found:
        return None
    runs = {users: run for users, run in found["guard"].items() if isinstance(run, dict)}
    keys = ["unwatched_tokens_per_s", "tokens_per_s", "drafts", "every"]
    rows = [[users, *(run.get(key) for key in keys)] for users, run in runs.items()]
    text = "## Looking at drafts, for the drift guard\n\nA server looks once in 512 launches. "
    text += f"{found['guard'].get('note', '')}\n\n"
    return text + table(["users", "tokens/s, no looks", "tokens/s", "looks", "launches to one"], rows)


def offline(found: Figures) -> str | None:
    if "offline" not in found:
        return None
    rows = [[name, run["requests"], run["tokens"], run["tokens_per_s"]] for name, run in found["offline"].items()]
    return "## Queued requests\n\n" + table(["", "requests", "tokens", "tokens/s"], rows)


def long_context(found: Figures) -> str | None:
    if "long" not in found:
        return None
    figures = found["long"]
    contexts = {name: run for name, run in figures.items() if isinstance(run, dict)}
    rows = [
        [name, run["prompt_seconds"], run["prompt_tokens_per_s"], run["plain_step_us"], run["cycle_us"]]
        for name, run in contexts.items()
    ]
    text = f"## Long contexts\n\n{figures['formula']}; allocated: {figures['allocated_over_formula']:.1%} of it.\n\n"
    return text + table(["context", "prompt, s", "prompt tokens/s", "plain step, µs", "cycle of depth 3, µs"], rows)


def checks(found: Figures) -> str | None:
    if "checks" not in found:
        return None
    return CHECKS + "```json\n" + json.dumps(found["checks"], indent=1) + "\n```\n"


CHECKS = """## Checks

Where answers part, the network's two best logits are a rounding apart (`ties_only`). Sampled answers use the same random
numbers with and without speculation, so that they are equal up to such roundings, which one token in some dozens meets.

"""


def draw(found: Figures, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    vllm_plain, vllm_drafted, source = vllm_speeds(found)
    users = list(found["plain"])
    lines = {
        "Fledge, speculative": {
            u: found["spec"][best]["tokens_per_s_per_user"] for u in users if (best := best_depth(found, u))
        },
        "Fledge, plain": {u: found["plain"][u]["tokens_per_s_per_user"] for u in users},
        "vLLM, plain": vllm_plain,
        "vLLM, speculative": vllm_drafted,
    }
    figure, axes = plt.subplots(figsize=(7, 4))
    for (name, line), style in zip(lines.items(), ("o-", "o--", "s--", "s-"), strict=True):
        if line:
            axes.plot([int(u) for u in line], list(line.values()), style, label=name)
    axes.set(xscale="log", yscale="log", xlabel="users", ylabel="tokens/s per user", title=f"SmolLM2-135M ({source})")
    axes.set_xticks([int(u) for u in users], users)
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
