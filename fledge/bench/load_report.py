"""Reads prompts for the load client, runs it at several levels of concurrency, and shows the results as a table and a plot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge import progress
from fledge.bench.datasets import load_items
from fledge.bench.load import LoadReport, LoadSettings, run_level
from fledge.errors import UserError, literal
from fledge.files import write_atomically

if TYPE_CHECKING:
    from rich.table import Table

Conversation = list[dict[str, str]]
Runs = list[tuple[str, list[LoadReport]]]  # name of the run, and one report per level
ROLES = {"human": "user", "gpt": "assistant"}


def read_conversations(data: str) -> list[Conversation]:
    """First turns of a data set (`builtin`, a folder, a hub id), or the prompts of a file: JSONL in any of the usual
    forms, or plain text with one prompt per line. Each becomes messages that end with the user's turn."""
    path = Path(data).expanduser()
    if not path.is_file():
        return [[{"role": "user", "content": item.turns[0]}] for item in load_items(data)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {path}: cannot be read ({error})") from None
    result: list[Conversation] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record: Any = line
        if path.suffix in (".jsonl", ".json"):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"--data {path}, line {number}: not valid JSON ({error})") from None
        messages = _conversation(record)
        if messages is None:
            raise UserError(
                f"--data {path}, line {number}: no prompt in it; a line is a JSON object with 'prompt', 'messages', "
                "'conversations', 'turns' or 'question'"
            )
        result.append(messages)
    if not result:
        raise UserError(f"--data {path}: no prompts in it")
    return result


def _conversation(record: Any) -> Conversation | None:
    if isinstance(record, str):
        return [{"role": "user", "content": record}]
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("turns"), list) and record["turns"]:
        return _conversation(record["turns"][0])
    for name in ("prompt", "question", "instruction", "text"):
        if isinstance(record.get(name), str) and record[name]:
            return [{"role": "user", "content": record[name]}]
    turns = record.get("messages") or record.get("conversations") or record.get("prompt")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    messages = [
        {
            "role": ROLES.get(role := turn.get("role") or turn.get("from") or "", role),
            "content": str(turn.get("content") or turn.get("value") or ""),
        }
        for turn in turns
    ]
    while messages and messages[-1]["role"] != "user":
        messages.pop()  # recorded answers are dropped: the server writes its own
    return messages or None


def run_levels(
    settings: LoadSettings,
    conversations: Sequence[Conversation],
    levels: Sequence[int],
    plain: bool = False,
    on_progress: progress.Report = progress.silent,
) -> Runs:
    """Runs all levels. `plain`: repeats each without speculation right afterwards, so that both see the same machine state."""
    variants = [("speculative", replace(settings, speculate=True)), ("plain", replace(settings, speculate=False))]
    runs: Runs = [(name, []) for name, _ in variants] if plain else [("server", [])]
    total = len(levels) * len(runs) * len(conversations)
    for number, level in enumerate(levels):
        for (name, reports), variant in zip(runs, [one for _, one in variants] if plain else [settings], strict=True):
            before = (number * len(runs) + sum(len(others) > number for _, others in runs)) * len(conversations)

            def count(done: int, level: int = level, name: str = name, before: int = before) -> None:
                on_progress(f"{name}, concurrency {level}", before + done, total)

            reports.append(asyncio.run(run_level(variant, conversations, level, count)))
    return runs


HEADINGS = (
    "concurrency",
    "run",
    "requests",
    "errors",
    "tok/s",
    "tok/s per user",
    "TTFT",
    "TPOT",
    "ITL",
    "acceptance length",
)
# Columns dropped in this order if the terminal is too narrow; `--out` and `--json` have all of them.
DROPPED = ("ITL", "TPOT", "requests", "run", "errors")


def load_rows(runs: Runs) -> list[list[str]]:
    """One row per level and run, with the columns of `HEADINGS`."""
    rows = []
    for reports in zip(*(reports for _, reports in runs), strict=True):
        for (name, _), report in zip(runs, reports, strict=True):
            length, per_user = report.acceptance.length, report.per_user_tokens_per_second
            rows.append(
                [
                    str(report.concurrency),
                    name,
                    str(len(report.samples)),
                    str(len(report.errors)),
                    f"{report.tokens_per_second:.1f}",
                    f"{per_user:.1f}" if per_user else "–",
                    *(_median_and_tail(report.milliseconds(kind)) for kind in ("ttft", "tpot", "itl")),
                    f"{length:.2f}" if length is not None else "–",
                ]
            )
    return rows


def load_table(url: str, runs: Runs, width: int = 120) -> Table:
    """The results as a table that fits into `width`: columns are dropped, text is never cut."""
    from rich import box
    from rich.table import Table

    rows = load_rows(runs)
    kept = list(range(len(HEADINGS)))
    lengths = [
        max(max(map(len, title.split())), *(len(row[place]) for row in rows)) + 2 for place, title in enumerate(HEADINGS)
    ]
    is_needed = {"run": len(runs) > 1, "errors": any(report.errors for _, reports in runs for report in reports)}
    for heading in (name for name in DROPPED if not is_needed.get(name)):
        if sum(lengths[place] for place in kept) > width - 2:
            kept.remove(HEADINGS.index(heading))
    caption = "tok/s per user: median, after the first token; times in milliseconds: median / 99th percentile"
    table = Table(title=literal(f"load on {url}"), caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place in kept:
        heading = HEADINGS[place]
        table.add_column("\n".join(heading.split()), justify="left" if heading == "run" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[place] for place in kept))
    return table


def markdown(rows: list[list[str]]) -> str:
    ruler = [":---" if heading == "run" else "---:" for heading in HEADINGS]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(HEADINGS), ruler, *rows])


def _median_and_tail(figures: dict[str, float]) -> str:
    return f"{figures['p50']:.1f} / {figures['p99']:.1f}" if figures else "–"


def plot(runs: Runs, path: Path) -> None:
    """Plots total throughput against speed per user, one point per level: up and to the right is better."""
    from fledge.bench.report import pyplot

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, reports in runs:
        users = [report.per_user_tokens_per_second for report in reports]
        totals = [report.tokens_per_second for report in reports]
        axes.plot(users, totals, marker="o", label=name)
        for report, x, y in zip(reports, users, totals, strict=True):
            axes.annotate(f"{report.concurrency}", (x, y), textcoords="offset points", xytext=(5, 5))
    axes.set(xlabel="tokens/s per user", ylabel="tokens/s in total", title="by concurrency")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomically(path, lambda file: figure.savefig(file, dpi=150, format="png"))
    plt.close(figure)
