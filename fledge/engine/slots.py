"""The rows of a running batch, as device tensors: who is where, how far, and what was said.

A row is one request. A step reads and writes rows in place; the host only fills rows, moves them, and reads `status` late.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_STOP_IDS = 16

Rows = slice | Tensor


class Slots:
    def __init__(self, num_rows: int, max_answer: int, max_pages: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = torch.arange(num_rows, device=device)
        # Set by `fill`, then by `commit` on the device.
        self.active = zeros(num_rows, dtype=torch.bool)
        self.token = zeros(num_rows)  # the last of the text; its key is not in the cache yet
        self.length = zeros(num_rows, dtype=torch.int32)  # of the text, that token included
        self.answered = zeros(num_rows, dtype=torch.int32)  # tokens of the answer so far
        self.answers = zeros(num_rows, max_answer, dtype=torch.int32)
        self.status = zeros(num_rows, dtype=torch.int32)  # 0: running or empty; else the finished answer's length
        # Set by `fill`.
        self.limit = zeros(num_rows, dtype=torch.int32)  # most tokens of the answer
        self.seed = zeros(num_rows)
        self.temperature = zeros(num_rows, dtype=torch.float32)
        self.top_p = zeros(num_rows, dtype=torch.float32)
        self.page_table = zeros(num_rows, max_pages, dtype=torch.int32)
        self.set_by_step = (self.active, self.token, self.length, self.answered, self.answers, self.status)
        self.set_by_fill = (self.limit, self.seed, self.temperature, self.top_p, self.page_table)
        # Set for all rows at once.
        self.stop_ids = torch.full((MAX_STOP_IDS,), -1, device=device)

    def fill(
        self,
        rows: Tensor,
        lengths: Tensor,
        limits: Tensor,
        seeds: Tensor,
        page_table: Tensor,
        temperature: float,
        top_p: float,
    ) -> None:
        """Puts requests into rows; their prompts are in the cache and their first token is yet to be committed."""
        self.length.index_copy_(0, rows, lengths.int())
        self.limit.index_copy_(0, rows, limits.int())
        self.seed.index_copy_(0, rows, seeds)
        self.page_table.index_copy_(0, rows, page_table)
        self.temperature.index_fill_(0, rows, temperature)
        self.top_p.index_fill_(0, rows, top_p)
        self.answered.index_fill_(0, rows, 0)
        self.status.index_fill_(0, rows, 0)
        self.active.index_fill_(0, rows, True)

    def commit(self, rows: Rows, chosen: Tensor) -> None:
        """Appends each active row's token and ends the rows that are done. No host decision: fit for a graph."""
        active, answered = self.active[rows], self.answered[rows]
        place = (self.rows[rows], answered.long().clamp(max=self.answers.shape[1] - 1))
        self.answers[place] = torch.where(active, chosen.to(self.answers.dtype), self.answers[place])
        answered = answered + active
        ended = (chosen[:, None] == self.stop_ids).any(-1) | (answered >= self.limit[rows])
        self.token[rows] = torch.where(active, chosen, self.token[rows])
        self.length[rows] = self.length[rows] + active
        self.answered[rows] = answered
        self.status[rows] = torch.where(active & ended, answered, self.status[rows])
        self.active[rows] = active & ~ended

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Rows change places; their keys and values stay, for the page table moves along."""
        for tensor in (*self.set_by_step, *self.set_by_fill):
            tensor[targets] = tensor[sources]
        self.active.index_fill_(0, sources, False)

    def clear(self) -> None:
        self.active.zero_()
        self.status.zero_()
