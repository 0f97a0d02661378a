"""Figures for GPUs and training: each function makes Markdown from result files."""

from __future__ import annotations

from benchmarks.figure_blocks import figures, gpu_speeds, load, number, percent, table, times

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
    before, exact, now = (load(name) for name in ("one-engine-h200", "exact-h200", "steps-h200"))
    first = exact["speed, end tokens ignored"]["plain"]
    us = {name.split()[0]: run["us"] for name, run in now["shapes"]["135m before"].items() if run["depth"] == 0}
    us |= {str(run["rows"]): run["us"] for run in now["step forms"]["steps"] if run["few_programs"] == 48}
    rows = [[users, run["step_us"], first[users]["step_us"], us[users]] for users, run in before["speed"]["plain"].items()]
    return table(["rows of a plain step", "before, µs", "first exact kernels, µs", "now, µs"], rows)


@figures("gpu-linears")
def gpu_linears() -> str:
    layers = {(one["model"], one["rows"]): one for one in load("linears-h200")["layers"]}
    for rows in (16, 64):  # their forms were chosen again later, by the time of a step
        del layers["135m", rows]
    rows = []
    for count in sorted({count for _, count in layers}):
        found = [layers.get((model, count)) for model in ("135m", "1.5b", "8b")]
        rows.append([count, *(one and one[way] for one in found for way in ("best", "cublas"))])
    titles = [f"{size}: {way}" for size in ("135M", "1.5B", "8B") for way in ("Fledge", "cuBLAS")]
    return table(["rows", *titles], rows)


@figures("serving-gpu")
def serving_gpu() -> str:
    found = load("serving-h200")
    rows = []
    for users, run in found["fledge"].items():
        vllm = found["vLLM plain"][users]
        waits = [f"{one['ttft_ms']['p50']:.0f} / {one['ttft_ms']['p99']:.0f}" for one in (run, vllm)]
        own = found["engine"][users]["tokens_per_s"]
        cells = [own, run["tokens_per_second"], percent(run["share_of_engine"]), waits[0], vllm["tokens_per_second"], waits[1]]
        rows.append([int(users), *cells])
    wait = "TTFT p50 / p99, ms"
    titles = ["users", "engine alone", "Fledge's server", "of the engine", wait, "vLLM's server, plain", wait]
    settings, busy = found["settings"], found["fledge"]["64"]
    waits = " / ".join(f"{one['next']:.0f}" for one in busy["longest_waits_ms"])
    speeds = " / ".join(f"{one:,.0f}" for one in busy["rounds"])
    note = (
        f"HumanEval prompts, {settings['tokens']} tokens per answer, medians of {settings['rounds']} rounds. vLLM: one round\n"
        "with two requests per user, at least 16. The engine alone runs in its own process; runs differ by a few percent.\n"
        f"At 64 users the rounds gave {speeds} tokens/s, and the longest pauses of a stream were {waits} ms,\n"
        "because prefill graphs were captured at their second use. Since then they are captured while the server is\n"
        "idle; this was not measured again."
    )
    return f"{table(titles, rows)}\n\n{note}"


@figures("gpu-sizes")
def gpu_sizes() -> str:
    shapes = load("steps-h200")["shapes"]
    rows = []
    for count in (1, 4, 16, 64, 256):
        plain = {name: shapes[name].get(f"{count} rows, plain") for name in ("1.5b", "8b", "8b-fp8", "8b-int4", "30b-a3b")}
        cells: list[object] = [count]
        for name in ("1.5b", "8b"):
            cells += [plain[name]["us"], percent(plain[name]["share"]), shapes[name][f"{count} rows, depth 3"]["us"]]
        rows.append([*cells, *(plain[name] and plain[name]["us"] for name in ("8b-fp8", "8b-int4", "30b-a3b"))])
    titles = ["rows"]
    for size in ("1.5B", "8B"):
        titles += [f"{size}: plain step, µs", "of the roofline", "cycle of depth 3, µs"]
    return table([*titles, "8B in FP8: plain", "8B in int4: plain", "30B-A3B: plain"], rows)


@figures("gpu-prefill")
def gpu_prefill() -> str:
    found = load("steps-h200")["prefill"]["tokens_per_s"]
    sizes = {"1.5b": "1.5B", "8b": "8B"}
    return table(
        ["tokens/s", "in chunks of 1,024 tokens", "whole, four in a pass"],
        [[sizes[name], runs["chunks of 1024"], runs["chunks of 2048"]] for name, runs in found.items()],
    )


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
                f"{run['sequence']:,}",
                "random" if "--random-target" in run["command"] else "real",
                run["tokens_per_second"],
                f"{run['peak_memory_gib']:.1f} GiB",
                percent(run["target_share"]),
            ]
            rows.append([cells[0], *cells[1:]])
    return table(["sequence length", "target's weights", "tokens/s", "peak memory", "time in the target"], rows)


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
