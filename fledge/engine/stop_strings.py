"""Finds stop strings in streamed text, in time proportional to the text, however many stop strings there are.

This is an Aho-Corasick automaton: a state is the longest suffix of the text that is a prefix of a stop string, so its depth is
also the number of characters that must be held back from a stream.

    stops   END, NEW        text   … E N E W
                            state    E EN NE NEW -> found
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    stop: str
    end: int  # characters of the text up to and including the stop string


class StopAutomaton:
    """The automaton of one set of stop strings, shared by all requests that use the set."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        # Per state: the lowest index in `stops` of a stop string that ends here; len(stops) means none.
        self.first_stop = [len(stops)]
        for index, stop in enumerate(stops):
            state = 0
            for char in stop:
                state = self.children[state].get(char) or self._new_state(state, char)
            self.first_stop[state] = min(self.first_stop[state], index)
        self._link()

    def _new_state(self, parent: int, char: str) -> int:
        self.children.append({})
        self.depth.append(self.depth[parent] + 1)
        self.first_stop.append(len(self.stops))
        self.children[parent][char] = len(self.depth) - 1
        return len(self.depth) - 1

    def _link(self) -> None:
        """Computes `fallback`: the state to continue from when a state has no transition for a character."""
        self.fallback = [0] * len(self.depth)
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            shorter = self.fallback[state]
            self.first_stop[state] = min(self.first_stop[state], self.first_stop[shorter])
            for char, child in self.children[state].items():
                self.fallback[child] = self.next_state(shorter, char)
                queue.append(child)

    def next_state(self, state: int, char: str) -> int:
        while (following := self.children[state].get(char)) is None:
            if not state:
                return 0
            state = self.fallback[state]
        return following


@lru_cache(maxsize=256)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)


class StopMatcher:
    """Searches one text for stop strings as it grows."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = automaton(stops)
        self._state = 0
        self._length = 0

    @property
    def num_held(self) -> int:
        """The number of characters at the text's end that may be the start of a stop string."""
        return self._automaton.depth[self._state]

    def push(self, piece: str) -> StopMatch | None:
        """Processes the next piece of text. If several stop strings end in it, returns the one listed first in `stops`."""
        machine, state, found = self._automaton, self._state, None
        best = len(machine.stops)
        for offset, char in enumerate(piece, 1):
            state = machine.next_state(state, char)
            if machine.first_stop[state] < best:
                best = machine.first_stop[state]
                found = StopMatch(machine.stops[best], self._length + offset)
        self._state = state
        self._length += len(piece)
        return found
