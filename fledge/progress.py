"""Progress of long tasks on standard error: on a terminal a bar with rate and remaining time, else a plain line at intervals.

    with progress.task("loading weights", total=num_bytes, unit="bytes") as shown:
        shown.update(done)

Tasks may be nested; all of them share one display.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from fledge.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Item = TypeVar("Item")

DELAY_SECONDS = 0.3  # a task with a total is shown only after this time
# If standard error is not a terminal: seconds until a task's first line, and the maximum interval between lines.
FIRST_LINE_SECONDS, MAX_LINE_SECONDS = 10.0, 60.0
BAR_WIDTH = 20
BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class Task:
    """A task with progress. `total` None: the amount of work is not known."""

    def __init__(self, description: str, total: float | None = None, unit: str = "", done: float = 0.0) -> None:
        self.description, self.total, self.unit, self.note = description, total, unit, ""
        self.done = done
        self._begin()
        self._line_at, self._line_wait = self.began, FIRST_LINE_SECONDS

    def _begin(self) -> None:
        """Starts the measurement of the rate."""
        self.began, self._done_before = time.monotonic(), self.done

    def __enter__(self) -> Task:
        if self.total is None:
            _display.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _display.remove(self)

    def update(self, done: float | None = None, *, note: str | None = None) -> None:
        if done is not None:
            self.done = done
        if note is not None:
            self.note = note
        now = time.monotonic()
        if self.total is None or now - self.began >= DELAY_SECONDS:
            _display.add(self)
        if now - self._line_at >= self._line_wait and not _is_terminal():
            self._line_at, self._line_wait = now, min(2 * self._line_wait, MAX_LINE_SECONDS)
            print(f"fledge: {self.line()}", file=sys.stderr, flush=True)

    def advance(self, amount: float = 1) -> None:
        self.update(self.done + amount)

    def show(self, description: str, done: float | None = None, total: float | None = None) -> None:
        """Sets description, done and total, and updates the display. Given to functions as their `Report`."""
        self.change(description, done, total)
        self.update()

    def change(self, description: str, done: float | None = None, total: float | None = None) -> None:
        """`show` without output. If the total changes, the rate is measured from now on."""
        is_new = total != self.total or (done or 0) < self.done
        self.description, self.total, self.done = description, total, done or 0
        if is_new:
            self._begin()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def rate(self) -> float:
        """Units per second, since the start."""
        return (self.done - self._done_before) / self.seconds if self.seconds > 0 else 0.0

    def state(self) -> str:
        """Amount done and total, rate, and remaining time, as text."""
        if self.total is None:
            return duration(self.seconds)
        if self.unit == "seconds":
            return f"{duration(self.done)} of {duration(self.total)}, {duration(max(0, self.total - self.done))} left"
        rate = self.rate
        parts = [f"{_count(self.done, self.unit, self.total)} of {_count(self.total, self.unit, self.total, last=True)}"]
        if rate > 0:
            parts += [_rate(rate, self.unit), f"{duration(max(0.0, self.total - self.done) / rate)} left"]
        return ", ".join(parts)

    def line(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return printable(f"{self.description}: {self.state()}{note}")


def task(description: str, total: float | None = None, unit: str = "", done: float = 0.0) -> Task:
    """A new task. `unit`: what is counted, in the plural; "bytes" and "seconds" have their own formats."""
    return Task(description, total, unit, done)


def track(
    items: Collection[Item], description: str, unit: str, weight: Callable[[Item], float] | None = None
) -> Iterator[Item]:
    """Yields each item and shows progress. `weight`: the amount that an item counts, if not 1."""
    total = len(items) if weight is None else sum(map(weight, items))
    with Task(description, total, unit) as shown:
        for item in items:
            yield item
            shown.advance(1 if weight is None else weight(item))


def duration(seconds: float) -> str:
    """The time as text: 0:07, 12:30 or 2:05:00."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _count(value: float, unit: str, total: float, *, last: bool = False) -> str:
    if unit == "bytes":
        name, scale = next((entry for entry in BYTE_UNITS if total >= entry[1]), ("bytes", 1))
        return f"{value / scale:.1f} {name}" if last else f"{value / scale:.1f}"
    return f"{value:,.0f} {unit}".rstrip() if last else f"{value:,.0f}"


def _rate(rate: float, unit: str) -> str:
    if unit == "bytes":
        return f"{_count(rate, unit, rate, last=True)}/s"
    for name, seconds in (("s", 1), ("min", 60)):
        if rate * seconds >= 1:
            return f"{rate * seconds:,.1f}/{name}"
    return f"{rate * 3600:.1f}/h"


class Report(Protocol):
    """The callback by which a long function reports progress: `Task.show` or `silent`."""

    def __call__(self, description: str, done: float | None = None, total: float | None = None) -> None: ...


def silent(description: str, done: float | None = None, total: float | None = None) -> None:
    """A `Report` that shows nothing; the default."""


# --- the display ------------------------------------------------------------------------------------------------------


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _Display:
    """Shows the open tasks, one below the other. It is removed from the screen when no task is open."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._live: Live | None = None
        self._console: Console | None = None
        self._lock = threading.Lock()

    def console(self) -> Console:
        """The console for standard error; its output appears above the bars."""
        from rich.console import Console  # imported here: engines import this module, and most show nothing

        if self._live is not None and self._console is not None:
            return self._console
        return Console(stderr=True, highlight=False)

    def add(self, task: Task) -> None:
        if not _is_terminal():
            return
        with self._lock:
            if task not in self.tasks:
                self.tasks.append(task)
            if self._live is None:
                from rich.live import Live

                self._console = self.console()
                # If standard output is a file, printed text must go there and not above the bars.
                self._live = Live(
                    get_renderable=self.render,
                    console=self._console,
                    redirect_stdout=sys.stdout.isatty(),
                    transient=True,
                    refresh_per_second=4,
                )
                self._live.start()

    def remove(self, task: Task) -> None:
        with self._lock:
            if task in self.tasks:
                self.tasks.remove(task)
            if not self.tasks and self._live is not None:
                self._live.stop()
                self._live = None

    def close(self) -> None:
        for task in list(self.tasks):
            self.remove(task)

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines, width = [], self._console.width if self._console is not None else 80
        for task in list(self.tasks):
            state, line = task.state(), Text(no_wrap=True, overflow="ellipsis")
            room = width - len(state) - 2
            if not task.total:
                line.append("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(time.monotonic() * 4) % 10] + " ", "green")
            elif room - BAR_WIDTH >= len(task.description):  # a narrow terminal shows no bar, only the numbers
                filled = int(BAR_WIDTH * min(1.0, task.done / task.total))
                line.append("━" * filled, "green").append("━" * (BAR_WIDTH - filled) + " ", "dim")
            lines.append(line.append(printable(task.description, max(10, room - 3)) + "  " + state))
            if task.note:
                lines.append(Text("  " + printable(task.note), "dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


_display = _Display()


def close() -> None:
    """Removes all bars from the screen, after an error that ended the tasks."""
    _display.close()


def say(text: str) -> None:
    """Prints a line on standard error, above the bars. Also works where rich is not installed."""
    try:
        console = _display.console()
    except ImportError:
        print(text, file=sys.stderr, flush=True)
    else:
        console.print(text, markup=False, soft_wrap=True)


def console() -> Console:
    """The console for standard error; output through it does not disturb the bars."""
    return _display.console()
