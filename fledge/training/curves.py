"""The picture of a run."""

from __future__ import annotations

import io
from pathlib import Path

from fledge.training.journal import read_journal
from fledge.training.samples import write_atomically


def draw_curves(log: Path, picture: Path) -> None:
    """Loss, accuracy, acceptance length and drift, from a run's log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = read_journal(log)
    train = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    (loss, accuracy, acceptance), (rate, size, share) = axes
    steps = [line["step"] for line in train]
    if train:
        for j in range(len(train[0]["accuracy"])):
            colour = plt.cm.viridis(j / max(1, len(train[0]["accuracy"])))
            loss.plot(steps, [line["loss_by_step"][j] for line in train], color=colour, label=f"step {j + 1}")
            accuracy.plot(steps, [line["accuracy"][j] for line in train], color=colour, label=f"step {j + 1}")
        rate.plot(steps, [line["learning_rate"] for line in train], label="learning rate")
        norm = rate.twinx()
        norm.plot(steps, [line["grad_norm"] for line in train], color="tab:orange", alpha=0.6)
        norm.set_ylabel("gradient norm (orange)")
    if evaluations:
        for depth in evaluations[0]["acceptance_length"]:
            values = [line["acceptance_length"][depth] for line in evaluations]
            acceptance.plot([line["step"] for line in evaluations], values, "o-", label=f"depth {depth}")
        first, last = evaluations[0], evaluations[-1]
        depth = range(1, len(last["rms"]) + 1)
        for line, style in ((first, "--"), (last, "-")):
            size.plot(depth, line["rms"], style, color="tab:blue", label=f"after {line['step']} training steps")
            share.plot(depth, line["sink_share"], style, color="tab:green", label=f"sink, after {line['step']}")
            share.plot(depth, line["own_share"], style, color="tab:red", label=f"own tokens, after {line['step']}")
    for axis in (size, share):
        axis.set_ylim(bottom=0)
    for axis, title, x in (
        (loss, "cross-entropy by draft step (teacher-forced)", "training step"),
        (accuracy, "accuracy by draft step (teacher-forced)", "training step"),
        (acceptance, "acceptance length, held-out prompts, greedy", "training step"),
        (rate, "learning rate", "training step"),
        (size, "RMS of the state fed back", "draft step"),
        (share, "share of attention", "draft step"),
    ):
        axis.set_title(title)
        axis.set_xlabel(x)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    plt.close(figure)
    write_atomically(picture, lambda file: file.write(content.getvalue()))
