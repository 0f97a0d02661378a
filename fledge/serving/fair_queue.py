"""A round-robin queue over clients: one that sends a hundred requests does not delay one that sends a single request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


def room_for(wanted: int, held: int, running: int, max_queue: int) -> int:
    """Returns the limit on the total in flight for a caller who has `held` in flight and asks for `wanted` more.

    All arguments count answers, grammars or characters. `running`: how many are processed at a time, outside the queue. An
    extra quarter of `max_queue` is reserved for callers with little in flight. Without it, two requests for 128 answers each
    fill the queue, and everyone else is refused.
    """
    reserved = max_queue // 4
    return running + max_queue + (reserved if held + wanted <= reserved // 2 else 0)


class FairQueue(Generic[Item]):
    """First in, first out for each caller; round-robin over callers."""

    def __init__(self) -> None:
        self._by_caller: dict[str, deque[Item]] = {}
        self._turns: deque[str] = deque()  # callers with queued items, the next one first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def items(self, caller: str | None = None) -> Iterator[Item]:
        """Yields all queued items, or those of one caller."""
        for queue in self._by_caller.values() if caller is None else [self._by_caller.get(caller, ())]:
            yield from queue

    def push(self, caller: str, item: Item) -> None:
        if caller not in self._by_caller:
            self._by_caller[caller] = deque()
            self._turns.append(caller)
        self._by_caller[caller].append(item)
        self._length += 1

    def pop(self) -> Item:
        item = self.pop_for(lambda _: True)
        assert item is not None, "the queue is empty"
        return item

    def pop_for(self, may: Callable[[str], bool]) -> Item | None:
        """Removes and returns the first item of the next caller for whom `may` is true; None: there is no such caller."""
        caller = next(filter(may, self._turns), None)
        if caller is None:
            return None
        self._turns.remove(caller)
        item = self._by_caller[caller].popleft()
        self._length -= 1
        if self._by_caller[caller]:
            self._turns.append(caller)
        else:
            del self._by_caller[caller]
        return item

    def remove(self, unwanted: Callable[[Item], bool]) -> None:
        for caller, items in list(self._by_caller.items()):
            kept = deque(item for item in items if not unwanted(item))
            self._length -= len(items) - len(kept)
            if kept:
                self._by_caller[caller] = kept
            else:
                del self._by_caller[caller]
                self._turns.remove(caller)
