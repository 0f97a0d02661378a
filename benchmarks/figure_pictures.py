"""Draws measured figures as SVG: the demo's terminal (animated), the speed and the drift chart; `figures.py` writes them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.figure_blocks import gpu_speeds, load, number, times

SLOWED = 4  # the demo's answers take about a second, which is too fast to see
COLUMNS, LINE, GLYPH = 54, 17, 7.25  # in a pane: characters per line, pixels per line, pixels per character
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"


def wrapped(text: str, most: int) -> list[str]:
    lines = [part for line in text.splitlines() for part in (textwrap.wrap(line, COLUMNS, subsequent_indent="  ") or [""])]
    return lines if len(lines) <= most else [*lines[: most - 1], "…"]


def pane(left: float, top: float, title: str, lines: Sequence[str], seconds: float, cycle: float, colour: str) -> list[str]:
    """A title, and lines that appear one after the other within `seconds`; the animation repeats every `cycle` seconds."""
    parts = [f'<text x="{left}" y="{top}" fill="{colour}" font-weight="bold">{escape(title)}</text>']
    characters = sum(len(line) for line in lines) or 1
    before, start = 0, 0.3
    for index, line in enumerate(lines):
        y, width = top + (index + 1.6) * LINE, (len(line) + 1) * GLYPH
        begin, end = (start + seconds * count / characters for count in (before, before + len(line)))
        before += len(line)
        keys = f"0;{begin / cycle:.4f};{end / cycle:.4f};1"
        clip = f"{'p' if left < 100 else 's'}{index}"
        parts.append(
            f'<clipPath id="{clip}"><rect x="{left}" y="{y - 13:.1f}" height="18" width="{width:.1f}">'
            f'<animate attributeName="width" dur="{cycle}s" repeatCount="indefinite" keyTimes="{keys}" '
            f'values="0;0;{width:.1f};{width:.1f}"/></rect></clipPath>'
            f'<text x="{left}" y="{y:.1f}" clip-path="url(#{clip})" xml:space="preserve">{escape(line)}</text>'
        )
    return parts


def appears(text: str, x: float, y: float, at: float, cycle: float, colour: str) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-weight="bold" xml:space="preserve">{escape(text)}<animate '
        f'attributeName="fill-opacity" dur="{cycle}s" repeatCount="indefinite" calcMode="discrete" '
        f'keyTimes="0;{at / cycle:.4f}" values="0;1"/></text>'
    )


def demo() -> str:
    """One prompt of the demo, without and with the drafter, at the measured speeds; below it the demo's summary."""
    found = load("demo-cpu")
    prompt, summary = found["prompts"][0], found["summary"]
    lines = wrapped(prompt["text"], 18)
    rates = [prompt[f"{kind}_tokens_per_second"] for kind in ("plain", "speculative")]
    lasts = [SLOWED * prompt["tokens"] / rate for rate in rates]
    cycle = round(max(lasts) + 5, 1)
    height = 130 + LINE * (len(lines) + 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img" font-family="{MONO}" font-size="12" '
        f'fill="#d5dbe3">',
        "<title>make demo: the same answer without and with the drafter</title>",
        f'<rect width="900" height="{height}" rx="10" fill="#14181f"/>',
        *(f'<circle cx="{22 + 20 * i}" cy="20" r="6" fill="{c}"/>' for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))),
        '<text x="28" y="58"><tspan fill="#7ee787">$</tspan> make demo</text>',
        f'<text x="28" y="82" fill="#8b949e">{escape(prompt["prompt"])}</text>',
    ]
    parts += pane(28, 112, f"plain: {number(rates[0])} tokens/s", lines, lasts[0], cycle, "#8b949e")
    parts += pane(466, 112, f"with the drafter: {number(rates[1])} tokens/s", lines, lasts[1], cycle, "#7ee787")
    same = "yes" if summary["identical"] else "no"
    end = (
        f"{len(found['prompts'])} prompts: {times(summary['speed_up'])} as fast    "
        f"{number(summary['acceptance_length'])} tokens a step    identical output: {same}"
    )
    parts.append(appears(end, 28, height - 48, 0.5 + max(lasts), cycle, "#79c0ff"))
    where = f"{found['model']}, {found['provenance']['device']}, shown {SLOWED} times slower than it runs"
    parts.append(f'<text x="28" y="{height - 22}" fill="#6e7681">{escape(where)}</text></svg>')
    return "\n".join(parts) + "\n"


def bars(left: float, width: float, title: str, rows: Sequence[tuple[str, float, str]]) -> list[str]:
    """Horizontal bars, each with its label on the left and its figure on the right."""
    most, label = max(value for _, value, _ in rows), 150
    parts = [f'<text x="{left}" y="28" class="title">{escape(title)}</text>']
    for index, (name, value, kind) in enumerate(rows):
        y, long = 48 + 25 * index, (width - label - 60) * value / most
        parts.append(f'<text x="{left + label - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{left + label}" y="{y}" width="{long:.1f}" height="19" rx="3" class="{kind}"/>')
        parts.append(f'<text x="{left + label + long + 6:.1f}" y="{y + 14}">{number(value)}</text>')
    return parts


def speed() -> str:
    """Tokens/s per user: on a CPU compared with llama.cpp, on a GPU with vLLM for 1 and 16 users."""
    rows = load("cpu-vs-llamacpp-smollm2-135m")["rows"]
    cpu = [
        ("llama.cpp", rows["llama.cpp"]["tokens_per_second"], "other"),
        ("Fledge", rows["Fledge, plain"]["tokens_per_second"], "plain"),
        ("Fledge + drafter", rows["Fledge, drafter"]["tokens_per_second"], "drafted"),
    ]
    plain, drafted = gpu_speeds()
    vllm = load("gpu-h200")["vllm_earlier"]["plain"]
    gpu = []
    for users in ("1", "16"):
        who = "1 user" if users == "1" else f"{users} users"
        gpu += [(f"vLLM, {who}", float(vllm[users]), "other"), (f"Fledge, {who}", plain[users], "plain")]
        gpu.append((f"+ drafter, {who}", drafted[users], "drafted"))
    height = 60 + 25 * len(gpu)
    style = (
        "text{fill:#24292f}.title{font-weight:600;font-size:14px}.other{fill:#9aa4af}.plain{fill:#5b8def}.drafted{fill:#2da44e}"
        "@media (prefers-color-scheme:dark){text{fill:#d5dbe3}.other{fill:#6e7681}}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img" font-family="{SANS}" font-size="12.5">',
        f"<title>Tokens per second per user, SmolLM2-135M</title><style>{style}</style>",
        *bars(0, 430, "Two CPU cores, 4-bit GGUF: tokens/s after the first", cpu),
        *bars(460, 440, "One H200, bf16: tokens/s per user, whole request", gpu),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def lines(left: float, title: str, series: dict[str, list[float]], top: float) -> list[str]:
    """A line chart: one line per drafter over draft steps, from 0 to `top`."""
    width, height, base = 330, 170, 220
    parts = [f'<text x="{left}" y="26" class="title">{escape(title)}</text>']
    parts.append(f'<path d="M{left + 40} 50 V{base} H{left + 40 + width}" class="axis"/>')
    for mark in (0, top / 2, top):
        y = base - height * mark / top
        parts.append(f'<text x="{left + 34}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for name, values in series.items():
        points = [(left + 40 + width * i / (len(values) - 1), base - height * v / top) for i, v in enumerate(values)]
        kind = "drafted" if name.endswith("3.1") else "other"
        parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>')
        parts.append(f'<text x="{points[-1][0] + 6:.1f}" y="{points[-1][1] + 4:.1f}">{escape(name)}</text>')
    steps = len(next(iter(series.values())))
    parts += [
        f'<text x="{left + 40 + width * (n - 1) / (steps - 1):.1f}" y="{base + 18}" text-anchor="middle">{n}</text>'
        for n in (1, 8, steps)
    ]
    return [*parts, f'<text x="{left + 40 + width / 2}" y="{base + 36}" text-anchor="middle">draft step</text>']


def drift() -> str:
    """The measured size of the fed-back state and attention on the drafter's own tokens, by draft step."""
    probes = load("drift-h200")["probes"]
    size = {name: [value / found["rms"][0] for value in found["rms"]] for name, found in probes.items()}
    own = {name: found["own_share"] for name, found in probes.items()}
    style = (
        "text{fill:#24292f}.title{font-weight:600;font-size:14px}.axis{fill:none;stroke:#9aa4af}polyline{fill:none;stroke-width:2.5}"
        ".other{stroke:#cf222e}.drafted{stroke:#2da44e}@media (prefers-color-scheme:dark){text{fill:#d5dbe3}}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 270" role="img" font-family="{SANS}" font-size="12.5">',
        f"<title>Attention drift by draft step, measured on SmolLM2-135M</title><style>{style}</style>",
        *lines(0, "Size of the fed-back state, over step 1", size, 1.6),
        *lines(470, "Attention on the drafter's own tokens", own, 0.5),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


PICTURES: dict[str, Callable[[], str]] = {"demo.svg": demo, "speed.svg": speed, "how-drift.svg": drift}
