"""Who is next: callers take turns, so that one who sends a hundred requests does not keep out one who sends one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out for each caller; round-robin over callers."""

    def __init__(self) -> None:
        self._by_caller: dict[str, deque[Item]] = {}
        self._turns: deque[str] = deque()  # callers that wait, the next one first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, caller: str, item: Item) -> None:
        if caller not in self._by_caller:
            self._by_caller[caller] = deque()
            self._turns.append(caller)
        self._by_caller[caller].append(item)
        self._length += 1

    def pop(self) -> Item:
        caller = self._turns.popleft()
        item = self._by_caller[caller].popleft()
        self._length -= 1
        if self._by_caller[caller]:
            self._turns.append(caller)
        else:
            del self._by_caller[caller]
        return item

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Takes out what is unwanted."""
        removed: list[Item] = []
        for caller, items in list(self._by_caller.items()):
            removed += [item for item in items if unwanted(item)]
            kept = deque(item for item in items if not unwanted(item))
            if kept:
                self._by_caller[caller] = kept
            else:
                del self._by_caller[caller]
                self._turns.remove(caller)
        self._length -= len(removed)
        return removed
