"""Tokenises texts outside the event loop, on one thread per tokenizer, round-robin over clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fledge.serving.errors import overloaded
from fledge.serving.fair_queue import FairQueue, room_for

Result = TypeVar("Result")


class TokenizerThread:
    """The thread of one tokenizer, which is not thread-safe. Only the event loop may use this. `room`: the limit on queued
    characters. `on_refusal` is called when a text is refused because of it."""

    def __init__(self, name: str, room: int, on_refusal: Callable[[], None]) -> None:
        self.room, self._on_refusal = room, on_refusal
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: FairQueue[tuple[asyncio.Future[None], int]] = FairQueue()  # (turn, characters)
        self._is_taken = False

    async def run(self, work: Callable[[], Result], length: int, caller: str) -> Result:
        """Runs `work` when it is the caller's turn. ApiError: the queue is full. `length`: the text's characters."""
        self._check_room(length, caller)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.push(caller, (turn, length))
        self._give_turn()
        try:
            await turn
            return await loop.run_in_executor(self._thread, work)
        finally:
            if turn.cancelled():  # cancelled before its turn
                self._waiting.remove(lambda item: item[0] is turn)
            else:
                self._is_taken = False
                self._give_turn()

    def _check_room(self, length: int, caller: str) -> None:
        waiting = sum(characters for _, characters in self._waiting.items())
        held = sum(characters for _, characters in self._waiting.items(caller))
        # With an empty queue any length is accepted.
        if waiting and waiting + length > room_for(length, held, 0, self.room):
            self._on_refusal()
            raise overloaded(f"{waiting} characters are queued for the tokenizer; try again later", 5)

    def _give_turn(self) -> None:
        while self._waiting and not self._is_taken:
            turn, _ = self._waiting.pop()
            if not turn.done():  # its client has not disconnected
                self._is_taken = True
                turn.set_result(None)
