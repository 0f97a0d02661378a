"""Which graphs are compiled and recorded ahead. No GPU is needed: the shapes requested from a batch are checked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fledge.engine.config import EngineConfig
from fledge.engine.executors.batch_state import ADJUSTED, GREEDY, SAMPLED, TRUNCATED
from fledge.engine.executors.prefill import MIDDLE
from fledge.engine.executors.recording import UsualGraphs


class RecordedShapes:
    """Notes the shapes that would be recorded."""

    def __init__(self) -> None:
        self.graphs = SimpleNamespace(graphs={})
        self.wanted: set[tuple] = set()

    def record_wanted(self) -> bool:
        found = bool(self.wanted)
        if found:
            self.record([self.wanted.pop()])
        return found

    def record(self, shapes) -> None:
        self.graphs.graphs |= dict.fromkeys(shapes)


class Batch(RecordedShapes):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes, self.chunk_tokens = sizes, 2048
        self.config = EngineConfig(max_model_len=4096, max_num_seqs=sizes[-1], prefix_caching=False)
        self.prefills, self.chunks = RecordedShapes(), RecordedShapes()

    def kv_bucket(self, _: int) -> tuple[int, ...]:
        return ()


@pytest.fixture
def batch() -> Batch:
    return Batch([1, 2, 4, 8, 2048])


def test_offline_work_compiles_the_cycles_of_all_sizes_and_no_prefill(batch):
    UsualGraphs(batch, [0]).compile_cycles((SAMPLED, GREEDY))
    plain = {shape for shape in batch.graphs.graphs if shape[2] != ADJUSTED}
    assert plain == {(size, 0, mode) for size in batch.sizes for mode in (SAMPLED, GREEDY)}
    assert not batch.prefills.graphs.graphs
    assert not batch.chunks.graphs.graphs


def test_a_server_records_prefills_and_chunks_too(batch):
    UsualGraphs(batch, [0, 3]).warm_up()
    cycles = batch.graphs.graphs
    assert {shape[2] for shape in cycles} == {GREEDY, SAMPLED, TRUNCATED, ADJUSTED}
    assert {shape[1] for shape in cycles} == {0, 3}
    # 14 sizes in 3 sampling modes; the kernels of the fourth mode are compiled for 4 and for 64 prompts.
    prefills = batch.prefills.graphs.graphs
    assert len(prefills) == 44
    assert {shape for shape in prefills if shape[2] == ADJUSTED} == {(64, 4, ADJUSTED), (256, 64, ADJUSTED)}
    assert {shape[1] for shape in batch.chunks.graphs.graphs} == {MIDDLE, GREEDY, SAMPLED, TRUNCATED, ADJUSTED}


def test_prefills_with_adjusted_logits_are_recorded_when_idle(batch):
    usual = UsualGraphs(batch, [0])
    usual.warm_up()
    sampled_at = None
    while usual.idle():
        count = sum(shape[2] == ADJUSTED for shape in batch.prefills.graphs.graphs)
        if sampled_at is None and not batch.samples_truncated:
            sampled_at = count
    assert sampled_at == 2, "plain sampling must be recorded before adjusted logits"
    assert count == 14


def test_sizes_noted_under_load_are_recorded_when_idle(batch):
    usual = UsualGraphs(batch, [0])
    usual.warm_up()
    assert batch.prefills.waits_for_quiet
    assert batch.chunks.waits_for_quiet
    while usual.idle():
        pass
    batch.prefills.wanted = {(4096, 64, GREEDY)}
    assert usual.idle()
    assert (4096, 64, GREEDY) in batch.prefills.graphs.graphs
    assert not usual.idle()
