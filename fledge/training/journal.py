"""The records of a training run: a JSONL log, TensorBoard, and progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fledge import progress
from fledge.files import write_atomically
from fledge.training.data.prefetch import StepInput
from fledge.training.targets.target import Target


class Journal:
    """Records the figures of a run. Does nothing unless `active`, which is set only on the first process."""

    def __init__(
        self,
        folder: Path,
        *,
        active: bool,
        resumed_step: int,
        total_steps: int | None,
        max_seconds: float | None,
        label: str = "",
    ) -> None:
        """`label`: the arm's name, if there are several."""
        self._label = f"{label}: " if label else ""
        self.active, self.folder, self.total_steps, self.max_seconds = active, folder, total_steps, max_seconds
        self.path = folder / "log.jsonl"
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._forget_after(resumed_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _board(folder / "tensorboard", resumed_step)
        self._task = progress.task(f"training {label}".rstrip(), total_steps, "steps", done=resumed_step)

    def _forget_after(self, step: int) -> None:
        """Removes records after `step`, the checkpoint from which the run resumes: these steps will run again."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        write_atomically(self.path, lambda file: file.write("".join(line + "\n" for line in kept).encode()))

    def log(self, text: str) -> None:
        if self.active:
            progress.say(self._label + text)

    def record(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        if not self.active:
            return
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **figures}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in figures.items() if self._board is not None else ():
            for suffix, number in _numbers(value):
                self._board.add_scalar(f"{kind}/{name}{suffix}", number, step)

    def progress(self, step: int, seconds: float, text: str) -> None:
        """Shows the progress towards the limit that is reached first: the run's steps, or its maximum training time."""
        if not self.active:
            return
        share, share_of_time = step / (self.total_steps or float("inf")), seconds / (self.max_seconds or float("inf"))
        by_time = share_of_time > share
        self._task.unit = "seconds" if by_time else "steps"
        limits = (seconds, self.max_seconds) if by_time else (step, self.total_steps)
        training = f"training {self._label}".rstrip(": ")
        self._task.change(f"{training}, step {step:,}" if by_time else training, *limits)
        if sys.stderr.isatty():
            self._task.update(note=text)
        else:
            print(f"{self._label}step {step}: {text}; {self._task.state()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if not self.active:
            return
        self._task.__exit__()
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path, resumed_step: int) -> Any:
    """Returns a TensorBoard writer; None if it is not installed, since `log.jsonl` has the same figures."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the last line of a run that was killed may be cut short
        return float("inf")


def _numbers(value: Any) -> list[tuple[str, float]]:
    if isinstance(value, int | float):
        return [("", float(value))]
    if isinstance(value, list | tuple):
        return [(f"/{i}", float(v)) for i, v in enumerate(value) if isinstance(v, int | float)]
    if isinstance(value, dict):
        return [(f"/{k}", float(v)) for k, v in value.items() if isinstance(v, int | float)]
    return []


def draw_curves(log: Path, picture: Path) -> None:
    """Plots loss, accuracy, acceptance length and drift from a run's log; without matplotlib, only prints a note."""
    try:
        import matplotlib
    except ImportError:
        progress.say(f"no {picture.name}: matplotlib is not installed; {log} has the figures")
        return
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
    write_atomically(picture, lambda file: figure.savefig(file, format="png", dpi=110))
    plt.close(figure)


def describe_not_finite(step: int, step_input: StepInput | None, target: Target, folder: Path) -> str:
    """Says which step failed and whether the target or the drafter caused it. Saves the batch in `folder`."""
    text = f"step {step}: the loss is not a finite number"
    if step_input is None:
        return text
    where = folder / "not-finite.pt"
    write_atomically(where, lambda file: torch.save([vars(packed) for packed in step_input.packed], file))
    text += f" (epoch {step_input.epoch:.3f}; its batch is saved in {where})"
    for number, (batch, packed) in enumerate(zip(step_input.batches, step_input.packed, strict=True)):
        finite = torch.stack([torch.isfinite(tap).all(-1) for tap in target.states(batch).taps]).all(0)
        finite = finite.view(batch.tokens_BT.shape).cpu()
        if not finite.all():
            row, column = (~finite).nonzero()[0].tolist()
            return text + (
                f"; the target's own states are not finite in batch {number}, row {row}, "
                f"document {int(packed.document[row, column])}: try target.dtype=bfloat16 or float32"
            )
    documents = sum(int(packed.document.max(1).values.sum()) for packed in step_input.packed)
    return text + (
        f"; the target's states of its {documents} documents are fine, so the drafter diverged: "
        "lower optimizer.learning_rate, or lengthen optimizer.warmup"
    )
