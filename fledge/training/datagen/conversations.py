"""Conversations on their way through the target: prepared ahead of it, written down behind it.

prompts → open → [fresh] ─┐                     ┌→ settle → line of the file
                          ├→ the generator asks ┤
         [follow-ups] ────┘                     └→ settle → the next turn: a follow-up
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from typing import TYPE_CHECKING

from fledge.errors import UserError
from fledge.training.data.workers import Workers
from fledge.training.datagen.dialogues import Answered, Dialogue, Settled
from fledge.training.datagen.prompts import AnswerFile, Prompt

if TYPE_CHECKING:
    from fledge.training.datagen.regenerate import RegenerateReport

# Batches of answers handed over and not settled. Where workers cannot follow, the generator waits, not the memory grows.
MAX_SETTLING = 256


class Conversations(Iterator["list[int] | None"]):
    """What the generator reads: prompts, and None where it should go on with those it has and ask again."""

    def __init__(
        self,
        prompts: Iterator[Prompt],
        workers: Workers,
        file: AnswerFile,
        report: RegenerateReport,
        seed: int,
    ):
        self._prompts, self._workers, self._file, self._report, self._seed = prompts, workers, file, report, seed
        self._opening: deque[Future] = deque()
        self._num_opening = 0  # prompts in them
        self._fresh: deque[Dialogue] = deque()
        self._follow_ups: deque[Dialogue] = deque()  # first: what is begun should end
        self._asked: dict[int, Dialogue] = {}
        self._num_asked = 0
        self._answered: list[Answered] = []  # to be handed over together
        self._settling: deque[Future] = deque()
        self._advance()  # already while the generator gets ready

    def __next__(self) -> list[int] | None:
        self._hand_over()
        self._advance()
        while not (self._follow_ups or self._fresh):
            if self._asked:
                return None
            if not (self._opening or self._settling):
                raise StopIteration
            wait([*islice(self._opening, 1), *islice(self._settling, 1)], return_when=FIRST_COMPLETED)
            self._advance()
        dialogue = (self._follow_ups or self._fresh).popleft()
        self._asked[self._num_asked] = dialogue
        self._num_asked += 1
        return dialogue.prompt_ids

    def seed(self, index: int) -> int:
        """Its own for each turn of each prompt: an answer does not depend on when it was asked for."""
        dialogue = self._asked[index]
        name = f"{self._seed}/{len(dialogue.turns)}/{dialogue.prompt.id}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1

    def answer(self, index: int, ids: list[int], reason: str) -> None:
        self._answered.append(Answered(self._asked.pop(index), ids, reason))
        if len(self._answered) >= self._workers.batch:
            self._hand_over()

    def finish(self) -> None:
        """When the generator has nothing left to do."""
        if self._asked:
            answered = self._num_asked - len(self._asked)
            raise UserError(f"the generator answered {answered} of {self._num_asked} prompts; run again to go on")
        self._hand_over()
        while self._settling:
            self._take_settled(self._settling.popleft().result())

    def abandon(self) -> None:
        """When the time is over: conversations end with the last turn that was answered, and those without one are dropped."""
        begun = [dialogue for dialogue in [*self._asked.values(), *self._follow_ups] if dialogue.turns]
        self._asked.clear()
        self._follow_ups.clear()
        self.finish()
        begun += self._follow_ups
        for dialogue in begun:
            dialogue.messages.pop()  # the user's, which is not answered
        self._file.append([(dialogue.prompt.id, dialogue.line()) for dialogue in begun])
        self._report.conversations += len(begun)

    def salvage(self) -> None:
        """After an error: what was answered is written down, as far as that is still possible."""
        try:
            self._hand_over()
            while self._settling:
                self._take_settled(self._settling.popleft().result(timeout=60))
        except Exception:
            pass  # the first error is the one to be told

    # --- workers ------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        if self._answered:
            self._settling.append(self._workers.submit(self._settle, self._answered))
            self._answered = []
        while len(self._settling) > MAX_SETTLING:
            self._take_settled(self._settling.popleft().result())

    def _settle(self, answered: list[Answered]) -> Settled:
        settled = self._workers.call("settle", answered)
        self._file.append(settled.lines)
        return settled

    def _advance(self) -> None:
        """Takes what workers have done, and gives them more prompts to open."""
        while self._settling and self._settling[0].done():
            self._take_settled(self._settling.popleft().result())
        self._take_opened()
        while len(self._follow_ups) + len(self._fresh) + self._num_opening < self._workers.ahead:
            prompts = list(islice(self._prompts, self._workers.batch))
            if not prompts:
                return
            self._opening.append(self._workers.submit(self._workers.call, "open", prompts))
            self._num_opening += len(prompts)
            self._take_opened()

    def _take_opened(self) -> None:
        """In the order of the prompts."""
        while self._opening and self._opening[0].done():
            opened = self._opening.popleft().result()
            self._num_opening -= len(opened)
            for dialogue in opened:
                if isinstance(dialogue, Dialogue):
                    self._fresh.append(dialogue)
                else:
                    setattr(self._report, dialogue, getattr(self._report, dialogue) + 1)

    def _take_settled(self, settled: Settled) -> None:
        self._follow_ups.extend(settled.going_on)
        self._report.conversations += len(settled.lines)
        self._report.looping += settled.looping
