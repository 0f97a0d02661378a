"""The curve of a learn folder: acceptance length over the requests served, with the swaps marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fledge.errors import UserError
from fledge.learning.generations import read_history


def summarize(events: list[dict[str, Any]]) -> str:
    """Returns a summary text, with one line per swap or roll-back."""
    points = [event for event in events if event["event"] == "point"]
    if not points:
        raise UserError("history.jsonl has no point of the curve yet: the first one needs 32 finished requests with drafts")
    refused = sum(event["event"] == "refused" for event in events)
    first, last = points[0], points[-1]
    lines = [
        f"{last['requests']:,} requests, {last['steps']:,} training steps: acceptance length "
        f"{first['acceptance_length']:.2f} at first, {last['acceptance_length']:.2f} now (32 requests each); "
        f"{refused} candidates refused"
    ]
    for event in events:
        if event["event"] == "swap":
            fixed = f", fixed set {event['fixed_before']:.2f} → {event['fixed_after']:.2f}" if event.get("fixed_before") else ""
            lines.append(
                f"  at {event['requests']:,} requests generation {event['generation']}: held-out traffic "
                f"{event['recent_before']:.2f} → {event['recent_after']:.2f}{fixed}"
            )
        elif event["event"] == "rollback":
            lines.append(f"  at {event['requests']:,} requests back to generation {event['generation']}: {event['reason']}")
    return "\n".join(lines)


def draw(events: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = [event for event in events if event["event"] == "point"]
    figure, axis = plt.subplots(figsize=(8, 4))
    axis.plot([p["requests"] for p in points], [p["acceptance_length"] for p in points], color="#1f7a4d", marker=".")
    for kind, style, label in (("swap", "--", "swap"), ("rollback", ":", "roll-back")):
        for number, event in enumerate(one for one in events if one["event"] == kind):
            colour = "#8a94a0" if kind == "swap" else "#b3261e"
            axis.axvline(event["requests"], color=colour, linestyle=style, linewidth=1, label=None if number else label)
    axis.set_xlabel("requests served")
    axis.set_ylabel("acceptance length")
    axis.grid(alpha=0.3)
    if any(event["event"] in ("swap", "rollback") for event in events):
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(folder: Path, output: Path | None = None) -> tuple[list[dict[str, Any]], str]:
    """Draws the curve to `output` (default: `curve.png` in the folder); returns the history's events and their summary."""
    events = read_history(folder)
    text = summarize(events)
    path = output or folder / "curve.png"
    draw(events, path)
    return events, f"{text}\ncurve in {path}"
