"""Prepares batches and moves them to the device in a separate thread, each with the loader's position after it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.training.data.packing import PackedBatch, PackedLoader
from fledge.training.objective import Objective
from fledge.training.ttt import TrainBatch


@dataclass(frozen=True)
class StepInput:
    """All batches of one optimizer step."""

    packed: list[PackedBatch]  # on the host
    batches: list[TrainBatch]  # on the device
    num_valid_K: Tensor  # on the host; sum over all batches
    num_outside_K: Tensor
    loader_state: dict[str, Any]  # of the loader after these batches, for resuming
    epoch: float


class Prefetcher(Iterator[StepInput]):
    def __init__(self, loader: PackedLoader, objective: Objective, device: torch.device) -> None:
        self._loader, self._objective, self._device = loader, objective, device
        self._queue: queue.Queue[StepInput | BaseException] = queue.Queue(maxsize=3)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="prefetch")
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device.index or 0)  # older torch refuses a device without an index
            while not self._stopped.is_set():
                self._put(self._make())
        except BaseException as error:  # raised again by `__next__`
            self._put(error)

    def _make(self) -> StepInput:
        packed = [next(self._loader) for _ in range(self._loader.batches_per_step)]
        state, epoch = self._loader.state_dict(), self._loader.epoch
        planned = [self._objective.plan(batch) for batch in packed]
        for batch in planned:
            self._objective.target.prefetch(batch)
        valid, outside = (torch.stack([getattr(b, name) for b in planned]).sum(0) for name in ("num_valid_K", "num_outside_K"))
        return StepInput(packed, [batch.to(self._device) for batch in planned], valid, outside, state, epoch)

    def _put(self, item: StepInput | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def __next__(self) -> StepInput:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        self._objective.target.close()
        self._thread.join(timeout=5)
