"""Texts that are tokenised beside the event loop: one thread for a tokenizer, whose callers take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fledge.serving.errors import overloaded
from fledge.serving.fair_queue import FairQueue, room_for

Result = TypeVar("Result")


class TokenizerThread:
    """A tokenizer must not be entered twice, so there is one thread. Used by the event loop alone. `room`: characters that may
    wait for it. `on_refusal` is called when one more would be too much."""

    def __init__(self, name: str, room: int, on_refusal: Callable[[], None]) -> None:
        self.room, self._on_refusal = room, on_refusal
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: FairQueue[tuple[asyncio.Future[None], int]] = FairQueue()  # turns, and characters
        self._is_taken = False

    async def run(self, work: Callable[[], Result], length: int, caller: str) -> Result:
        """`work`'s result, when it is the caller's turn; refuses when too much waits. `length`: characters of it."""
        self._check_room(length, caller)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.push(caller, (turn, length))
        self._give_turn()
        try:
            await turn
            return await loop.run_in_executor(self._thread, work)
        finally:
            if turn.cancelled():  # it left before its turn
                self._waiting.remove(lambda item: item[0] is turn)
            else:
                self._is_taken = False
                self._give_turn()

    def _check_room(self, length: int, caller: str) -> None:
        waiting = sum(characters for _, characters in self._waiting.items())
        held = sum(characters for _, characters in self._waiting.items(caller))
        # What nothing waits before is taken, however long.
        if waiting and waiting + length > room_for(length, held, 0, self.room):
            self._on_refusal()
            raise overloaded(f"{waiting} characters wait for the tokenizer; try again later", 5)

    def _give_turn(self) -> None:
        while self._waiting and not self._is_taken:
            turn, _ = self._waiting.pop()
            if not turn.done():  # its caller has not gone
                self._is_taken = True
                turn.set_result(None)
