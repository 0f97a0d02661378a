"""Prefill passes that are padded to the sizes of recorded graphs equal passes without padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fledge.engine.executors import prefill as prompt_pass
from fledge.engine.executors.batch_state import GREEDY
from fledge.engine.executors.prefill import PROMPTS, TOKENS, PrefillBatch
from fledge.kernels.adjustments import RowOptions
from tests.engine.test_device_batch import device_batch, entries, prompts
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config


def some(lengths: list[int]) -> PrefillBatch:
    numbers, nothing = np.arange(sum(lengths)), np.zeros((len(lengths), 0))
    return PrefillBatch(numbers, numbers, numbers, lengths, [0] * len(lengths), nothing, nothing, nothing)


def test_the_smallest_pass_with_room_for_a_spare_token_is_chosen():
    assert some([63]).shape == (64, 4)
    assert some([64]).shape == (128, 4)
    assert some([4095]).shape == (4096, 4)
    assert some([10, 20, 300, 5, 6]).shape == (512, 64)
    assert some([2] * 5).shape == (256, 64)  # one shape for any number of short prompts


def test_passes_too_large_for_recording_have_few_sizes(monkeypatch):
    assert some([TOKENS[-1] - 1]).shape == (TOKENS[-1], PROMPTS[0])
    assert some([TOKENS[-1]]).shape == (TOKENS[-1] + prompt_pass.MORE_TOKENS, PROMPTS[-1])
    assert some([1] * (PROMPTS[-1] + 1)).shape == (prompt_pass.MORE_TOKENS, 2 * PROMPTS[-1])
    assert some([100] * 200).shape == (20480, 256)
    monkeypatch.setattr(prompt_pass, "TOKENS", [8])
    batch = device_batch(tiny_decoder(), None, 8)
    batch.prefills.pads = True
    for _ in range(prompt_pass.RECORDED_AT):
        batch.prefill(entries(batch, prompts(5, 1)))
    assert not batch.prefills.buffers


@pytest.mark.parametrize("windows", [None, (7, None, 7, None)])
@pytest.mark.parametrize(("count", "is_recorded"), [(1, True), (5, True), (5, False)])
def test_padding_does_not_change_results(count, is_recorded, windows, monkeypatch):
    monkeypatch.setattr(prompt_pass, "RECORDED_AT", 1)
    if not is_recorded:
        monkeypatch.setattr(prompt_pass, "TOKENS", [8])
    decoder = tiny_decoder(windows=windows) if windows else tiny_decoder()
    drafter = tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True))
    batches = [device_batch(decoder, drafter, 8) for _ in range(2)]
    batches[1].prefills.pads = True
    texts = [prompts(count, seed) for seed in (1, 2)]  # the second set reuses the buffers of the first
    for batch in batches:
        for cache in (batch.cache, batch.method.cache):
            cache.keys.fill_(9.0)
            cache.values.fill_(9.0)
        for some_texts in texts:
            made = entries(batch, some_texts)
            batch.prefill(made)
        # Once more, with half of every other text cached: whole prompts and prompts with a cached prefix share a pass.
        batch.prefill([replace(init, num_cached=len(init.text) // 2 * (index % 2 == 0)) for index, init in enumerate(made)])
    assert bool(batches[1].prefills.buffers) == is_recorded
    for mine, theirs in zip(batches[1].state.carried, batches[0].state.carried, strict=True):
        torch.testing.assert_close(mine[:8], theirs[:8])  # the last row is the dummy
    for mine, theirs in ((batches[1].cache, batches[0].cache), (batches[1].method.cache, batches[0].method.cache)):
        torch.testing.assert_close(mine.keys, theirs.keys)  # padding is not stored
        torch.testing.assert_close(mine.values, theirs.values)


def test_recording_ahead_makes_the_buffers_used_later():
    """Whole prompts and prompts with a cached prefix share one buffer. Without a GPU recording just runs the pass."""
    batch = device_batch(tiny_decoder(), tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True)), 8)
    passes = batch.prefills
    passes.pads = True
    passes.graphs.capture, passes.graphs.record = True, lambda shapes: [passes._run(*shape) for shape in shapes]
    passes.record([(64, 4, GREEDY)])
    passes.graphs.capture = False
    before = dict(passes.buffers)
    made = entries(batch, [list(range(20)), list(range(40, 47))])
    passes.graphs.graphs = {(*shape, GREEDY): None for shape in before}  # they count as recorded
    batch.prefill(made)
    for entry, cached in zip(made, (16, 0), strict=True):
        entry.num_cached = cached
    batch.prefill(made)
    assert {shape: id(buffers) for shape, buffers in passes.buffers.items()} == {k: id(v) for k, v in before.items()}
    assert len(before) == 1


def test_a_size_is_recorded_at_its_second_use():
    batch = device_batch(tiny_decoder(), None, 8)
    batch.prefills.pads = True
    for expected in (0, 1, 1):
        batch.prefill(entries(batch, [[1, 2, 3]]))
        assert len(batch.prefills.buffers) == expected


def test_recording_does_not_count_first_tokens_twice():
    """While requests are running, recording runs a pass several times, for warm-up and timing, before the graph is replayed."""
    batch = device_batch(tiny_decoder(), None, 8)
    passes = batch.prefills

    def record(shapes) -> None:
        for shape in shapes:
            for _ in range(3):
                passes._run(*shape)
            passes.graphs.graphs[shape] = SimpleNamespace(replay=partial(passes._run, *shape))

    passes.pads = passes.graphs.capture = True
    passes.graphs.record = record
    [init] = entries(batch, [[1, 2, 3]])
    init.options = RowOptions(init.row, init.text, frequency=0.5)
    for is_recorded in (False, True, True):
        batch.prefill([init])
        assert bool(passes.graphs.graphs) == is_recorded
        assert batch.state.adjustments.counts_RV[init.row].sum() == 1


def test_a_server_under_load_notes_sizes_to_be_recorded_later(monkeypatch, caplog):
    monkeypatch.setattr(prompt_pass, "RECORDED_IN_TRAFFIC_AT", 6)
    batch = device_batch(tiny_decoder(), None, 8)
    passes, shape = batch.prefills, (64, 4, GREEDY)
    passes.pads = passes.waits_for_quiet = True

    def prefill() -> bool:
        """Whether the pass was recorded or replayed."""
        passes.buffers.clear()
        batch.prefill(entries(batch, [[1, 2, 3]]))
        return bool(passes.buffers)

    for expected in (set(), {shape}, {shape}):
        assert not prefill()
        assert passes.wanted == expected

    def no_memory(_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(passes, "record", no_memory)
    assert passes.record_wanted()
    assert "not enough GPU memory" in caplog.text
    assert [prefill() for _ in range(4)] == [False] * 4  # the size is not noted again
    assert not passes.record_wanted()

    passes.too_large.clear()
    assert prefill()  # after this many uses it is recorded although requests wait
    passes.wanted, passes.graphs.graphs = {shape}, {shape: None}
    assert not passes.record_wanted()  # already recorded
