from __future__ import annotations

import pytest
import torch

from fledge.kernels.state_store import store_states_reference, store_states_triton
from tests.kernels.support import device_of_kernels, runs_triton


@pytest.mark.parametrize("size", [8, 24])
@pytest.mark.parametrize("run", [store_states_reference, pytest.param(store_states_triton, marks=runs_triton)])
def test_states_are_stored_by_slot_and_position(run, size):
    device = "cpu" if run is store_states_reference else device_of_kernels()
    slots, limit, batch, width = 3, 12, 5, 4
    states = torch.randn(batch * width, 2 * size, device=device)[:, :size]
    slot = torch.tensor([1, slots, 0, 2, 0, slots], device=device)  # the second row has no slot
    starts = torch.tensor([0, 4, 10, 2, 5], dtype=torch.int32, device=device)  # the third row exceeds the limit
    active = torch.tensor([1, 1, 4, 0, 0], dtype=torch.int32, device=device)
    buffer = torch.zeros(slots * limit + 1, size, device=device)
    run(states, buffer, slot, starts, active, slots, limit)
    assert torch.equal(buffer[limit : limit + 4], states[:4])
    assert torch.equal(buffer[10:12], states[8:10])
    assert int((buffer != 0).any(1).sum()) == 6
