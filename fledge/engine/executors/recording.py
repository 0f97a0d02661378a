"""Records the graphs that most requests need: the essential ones at start; while no request runs, less urgent ones and those
of prefill sizes that recurred."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product

from fledge.engine.executors.batch_state import ADJUSTED, GREEDY, SAMPLED, TRUNCATED
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.engine.executors.graphs import size_for
from fledge.engine.executors.prefill import MIDDLE, PROMPTS, TOKENS, pass_sizes
from fledge.kernels import compile_ahead

# For batches up to this many rows, cycles for contexts of any length are recorded ahead besides those for short ones.
FEW_LONG_ROWS = 4
# For batches up to this many rows, ADJUSTED cycles of depth 0 and full depth are recorded ahead; others on first use.
FEW_ADJUSTED_ROWS = 16


class UsualGraphs:
    def __init__(self, batch: DeviceBatch, depths: Sequence[int]) -> None:
        """`depths`: the speculation depths of cycles, 0 included."""
        self.batch, self.depths = batch, sorted(depths, reverse=True)
        self.left: Iterator[Callable[[], None]] = iter(())

    def warm_up(self) -> list[str]:
        """Compiles all kernels, then records. SAMPLED batches run in TRUNCATED graphs until their own are recorded."""
        started = time.perf_counter()
        # ADJUSTED prefills use the same kernels for every number of tokens.
        sizes = [pass_sizes(0, prompts) for prompts in PROMPTS]
        _compile(chain(self._records((TRUNCATED, SAMPLED, GREEDY)), self._prefills(sizes, (ADJUSTED,))))
        compiled = time.perf_counter()
        for record in self._records((TRUNCATED, GREEDY)):
            record()
        self.batch.samples_truncated = True
        self.left = chain(self._records((SAMPLED,)), [self._sample], self._prefills(self._pass_sizes(), (ADJUSTED,)))
        for prefills in (self.batch.prefills, self.batch.chunks):
            prefills.waits_for_quiet = True
        families = (self.batch.graphs, self.batch.prefills.graphs, self.batch.chunks.graphs)
        count, seconds = sum(len(one.graphs) for one in families), time.perf_counter() - compiled
        return [f"kernels compiled in {compiled - started:.0f} s, {count} cycles and prefills recorded in {seconds:.0f} s"]

    def compile_cycles(self, modes: Sequence[int]) -> None:
        """Compiles the kernels of decoding cycles; graphs are recorded on first use, as offline runs need few shapes."""
        _compile(self._cycles(modes))

    def idle(self) -> bool:
        """Records one more graph. False: all are recorded."""
        for record in self.left:
            record()
            return True
        return any(prefills.record_wanted() for prefills in (self.batch.prefills, self.batch.chunks))

    def _records(self, modes: Sequence[int]) -> Iterator[Callable[[], None]]:
        """Functions that each record one graph, the largest first, whose memory the others share."""
        yield from self._cycles(modes)
        yield from self._prefills(self._pass_sizes(), (MIDDLE, *modes))

    def _pass_sizes(self) -> list[tuple[int, int]]:
        largest = size_for(TOKENS, min(self.batch.chunk_tokens, TOKENS[-1]))
        passes = {pass_sizes(size, prompts) for size, prompts in product(TOKENS, PROMPTS) if size <= largest}
        return sorted(passes, reverse=True)

    def _prefills(self, sizes: Sequence[tuple[int, int]], modes: Sequence[int]) -> Iterator[Callable[[], None]]:
        batch = self.batch
        for size, mode in product(sizes, modes):
            if mode != MIDDLE:
                yield partial(batch.prefills.record, [(*size, mode)])
        if batch.config.max_model_len > batch.chunk_tokens:
            for mode in modes:
                yield partial(batch.chunks.record, [(batch.chunk_tokens, mode)])

    def _sample(self) -> None:
        """Lets SAMPLED batches use their own graphs, which are recorded now."""
        self.batch.samples_truncated = False

    def _cycles(self, modes: Sequence[int]) -> Iterator[Callable[[], None]]:
        batch, short = self.batch, self.batch.kv_bucket(0)
        sizes = batch.sizes[::-1]
        shapes = [(size, depth, mode, *short) for size, mode, depth in product(sizes, modes, self.depths)]
        if GREEDY in modes:
            few = [size for size in sizes if size <= FEW_ADJUSTED_ROWS]
            shapes += [(size, depth, ADJUSTED, *short) for size, depth in product(few, dict.fromkeys((self.depths[0], 0)))]
        if short:  # batches with long contexts are usually small
            few = [size for size in sizes if size <= FEW_LONG_ROWS]
            shapes += [(size, depth, mode) for size, mode, depth in product(few, modes, self.depths)]
        for shape in shapes:
            yield partial(batch.record, [shape])


def _compile(records: Iterator[Callable[[], None]]) -> None:
    with compile_ahead.side_by_side():
        for record in records:
            record()
