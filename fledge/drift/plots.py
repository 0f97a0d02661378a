"""The report's plots, as PNG bytes."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fledge.drift.results import ENOUGH_PAIRS, shown_depth

COLOURS = ("#c2541b", "#1f6f8b", "#5b8c2a", "#7a4e9e", "#b08900", "#4a4a4a", "#d98cb3", "#63b7af", "#8c6239", "#a3a3ff")
BY_STEP = (
    ("rms", "RMS of the fed-back state", True),
    ("sink_share", "attention on the sink", False),
    ("own_share", "attention on its own tokens", False),
    ("prompt_share", "attention on the rest of the prompt", False),
    ("entropy", "entropy of attention (nats)", False),
    ("cosine", "cosine with the target's state (right drafts)", False),
    ("accuracy", "share of right drafts", False),
    ("joint_acceptance", "share of drafts right up to here", False),
)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()


def by_step(figures: dict[str, Any]) -> bytes:
    """Every probe over draft depth, drafters side by side."""
    shown = [panel for panel in BY_STEP if any(probes.get(panel[0]) for probes in figures["probes"].values())]
    figure, axes = plt.subplots(-(-len(shown) // 4), 4, figsize=(16, 3.4 * -(-len(shown) // 4)), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (name, title, logarithmic) in zip(axes.flat, shown, strict=False):
        for colour, (drafter, probes) in zip(_colours(figures), figures["probes"].items(), strict=False):
            points = [(step, value) for step, value in enumerate(probes.get(name) or [], 1) if value is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=drafter)
        if logarithmic:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
        elif axis.get_ylim()[0] > 0:
            axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("draft step", fontsize=8)
        _plain(axis)
    axes.flat[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return png(figure)


def by_head(figures: dict[str, Any], share: str) -> bytes:
    """One share per head (rows) and draft step (columns), one panel a drafter."""
    probes = {name: one[f"{share}_by_head"] for name, one in figures["probes"].items() if one.get(f"{share}_by_head")}
    figure, axes = plt.subplots(1, len(probes), figsize=(5.2 * len(probes), 3.4), squeeze=False)
    top = max(max(map(max, steps)) for steps in probes.values())
    for axis, (name, steps) in zip(axes.flat, probes.items(), strict=True):
        table = list(zip(*steps, strict=True))
        image = axis.imshow(
            table, aspect="auto", vmin=0, vmax=top, cmap="viridis", extent=(0.5, len(steps) + 0.5, len(table), 0)
        )
        axis.set_title(f"{name}: {share.replace('_', ' ')} by head", fontsize=10)
        axis.set_xlabel("draft step", fontsize=8)
        axis.set_ylabel("head", fontsize=8)
        figure.colorbar(image, ax=axis)
    figure.tight_layout()
    return png(figure)


def suite(figures: dict[str, Any], result: dict[str, Any]) -> bytes:
    """Acceptance length of every condition (over depth where there is only one)."""
    names = [one["name"] for one in figures["drafters"]]
    conditions, depth = result["conditions"], shown_depth(result["depths"])
    if len(conditions) == 1:
        return _over_depth(figures, result)
    height = max(2.2, 0.34 * len(conditions) * max(1, 0.6 * len(names)))
    figure, axis = plt.subplots(figsize=(8.4, height))
    thickness = 0.8 / len(names)
    for number, (name, colour) in enumerate(zip(names, _colours(figures), strict=False)):
        lengths = [condition["drafters"][name]["acceptance_length"][depth] for condition in conditions]
        mine = [condition["drafters"][name] for condition in conditions]
        errors = [one["standard_error"][depth] or 0.0 if one["texts"] >= ENOUGH_PAIRS else 0.0 for one in mine]
        places = [place + (number - (len(names) - 1) / 2) * thickness for place in range(len(conditions))]
        axis.barh(places, lengths, thickness, color=colour, label=name, xerr=errors, error_kw={"elinewidth": 0.8, "alpha": 0.6})
        for place, length, error in zip(places, lengths, errors, strict=True):
            axis.text(length + error, place, f" {length:.2f}", va="center", fontsize=7)
    axis.set_yticks(range(len(conditions)), [condition["name"] for condition in conditions], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=1)
    axis.set_xlabel(f"acceptance length at depth {depth}, with standard error", fontsize=8)
    axis.legend(
        fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(4, len(names))
    )  # clear of the bars
    _plain(axis)
    return png(figure)


def _over_depth(figures: dict[str, Any], result: dict[str, Any]) -> bytes:
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    for (name, one), colour in zip(result["conditions"][0]["drafters"].items(), _colours(figures), strict=False):
        lengths = [one["acceptance_length"][depth] for depth in result["depths"]]
        axis.plot(result["depths"], lengths, marker="o", markersize=3, color=colour, label=name)
    axis.set_xlabel("depth", fontsize=8)
    axis.set_ylabel("acceptance length", fontsize=8)
    axis.set_ylim(bottom=1)
    axis.legend(fontsize=8, frameon=False)
    _plain(axis)
    return png(figure)


def _colours(figures: dict[str, Any]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(figures["drafters"]))]


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
