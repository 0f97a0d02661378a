"""What a server records before its first request."""

from __future__ import annotations

import pytest

from fledge.engine import device_batch
from fledge.engine.warming_up import FEW_LONG_ROWS, record_ahead
from tests.engine.test_device_engine import device_engine
from tests.tiny import tiny_decoder


@pytest.mark.parametrize("few_keys", [128, 10**6])
def test_cycles_of_every_size_depth_and_way_and_long_ones_of_few_rows(few_keys, monkeypatch):
    monkeypatch.setattr(device_batch, "FEW_KEYS", few_keys)
    rows = device_engine(tiny_decoder(3), max_model_len=400, page_size=64).rows
    recorded, said = {}, []
    for name in ("graphs", "prompts", "pieces"):
        monkeypatch.setattr(getattr(rows, name), "record", lambda shapes, name=name: recorded.update({name: list(shapes)}))
    record_ahead(rows, [0, 1, 3], said.append)
    cycles, reach = recorded["graphs"], () if few_keys > 400 else (128,)
    assert len(set(cycles)) == len(cycles)
    assert {shape for shape in cycles if shape[3:] == reach} == {
        (size, depth, how, *reach) for size in rows.sizes for depth in (0, 1, 3) for how in range(3)
    }
    assert {shape[0] for shape in cycles if shape[3:] != reach} == ({1, 2, FEW_LONG_ROWS} if reach else set())
    assert cycles[0][0] == rows.sizes[-1]  # the largest first: the others fit into its memory
    assert recorded["prompts"]
    assert "pieces" not in recorded  # no prompt is longer than one
    assert len(said) == 2
