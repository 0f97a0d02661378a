"""Plots a stream: acceptance length over the requests served, live and on held-out prompts, with drafter swaps marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the plot. `results`: the result of `stream` in `learn.py`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    marks = sorted(int(mark) for mark in results["at"])
    figure, axis = plt.subplots(figsize=(8, 4))
    curve = results["curve"]
    live = [point["acceptance_length"] for point in curve]
    axis.plot([point["requests"] for point in curve], live, color="#b9d8c6", linewidth=1, label="live")

    def plot(name: str, label: str, colour: str, marker: str) -> list[float]:
        lengths = [results["at"][str(mark)][name] for mark in marks]
        # Errors of the ratio to the first measurement: differences between prompts cancel in pairs.
        errors = [lengths[0] * (results["at"][str(mark)][f"{name}_ratio"]["error"] or 0.0) for mark in marks]
        axis.errorbar(marks, lengths, errors, color=colour, marker=marker, capsize=3, label=label)
        return lengths

    frozen = plot("stream", "held-out requests", "#1f7a4d", "o")[0]
    if all("old" in results["at"][str(mark)] for mark in marks):
        plot("old", "old sets", "#5a6fa8", "s")
    axis.axhline(frozen, color="#8a94a0", linestyle="--", label="frozen drafter")
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
