"""What ends a run early: signals, handled between two steps, and losses that are no numbers."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fledge.files import write_atomically
from fledge.training.data.prefetch import StepInput
from fledge.training.targets.target import Target


class Interrupts:
    """Within the `with`, the first signal sets `wanted`; a second one is not caught."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *error: object) -> None:
        self._restore()


def describe_not_finite(step: int, step_input: StepInput | None, target: Target, folder: Path) -> str:
    """Where it happened and whose fault it was. Keeps the batch in `folder` for whoever wants to look."""
    text = f"step {step}: the loss is not a finite number"
    if step_input is None:
        return text
    where = folder / "not-finite.pt"
    write_atomically(where, lambda file: torch.save([vars(packed) for packed in step_input.packed], file))
    text += f" (epoch {step_input.epoch:.3f}; its batch is kept in {where})"
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
