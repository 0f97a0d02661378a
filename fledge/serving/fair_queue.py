"""Who is next: callers take turns, so that one who sends a hundred requests does not keep out one who sends one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


def room_for(wanted: int, held: int, running: int, max_queue: int) -> int:
    """How much may be in flight over all callers, once a caller who has `held` of it gets `wanted` more.

    `running`: what is worked on at a time, beside the queue. All are answers, grammars or characters. A further quarter of the
    queue is kept for callers who have little in it: two requests for 128 answers each fill the queue, and everybody else would
    be refused.
    """
    reserved = max_queue // 4
    return running + max_queue + (reserved if held + wanted <= reserved // 2 else 0)


class FairQueue(Generic[Item]):
    """First in, first out for each caller; round-robin over callers."""

    def __init__(self) -> None:
        self._by_caller: dict[str, deque[Item]] = {}
        self._turns: deque[str] = deque()  # callers that wait, the next one first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def items(self, caller: str | None = None) -> Iterator[Item]:
        """All that wait, or a caller's."""
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
        """Of the next caller that `may`; None: no caller may."""
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
