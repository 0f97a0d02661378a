"""The head that feeds tensor cores from memory: on the card against the logits, and compiled for it anywhere Triton is."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.linear import register_head as module
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.register_head import register_head
from fledge.kernels.quantization import dequantize, quantize
from fledge.kernels.sample import picked
from tests.kernels.test_register_mma import CODES, compiled_for_hopper, compiles, of_weight, on_card


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("rows", [pytest.param(rows, marks=on_card) for rows in (1, 5, 16, 20)])
def test_it_chooses_the_largest_logit_and_the_first_of_equal_ones(rows, mapped):
    x, weight = (torch.randn(count, 576, device="cuda").bfloat16() for count in (rows, 1000))
    weight[900] = weight[20]
    norm = Norm(torch.randn(576, device="cuda").bfloat16(), 1e-5)
    ids = torch.randperm(5000, device="cuda")[:1000].sort().values if mapped else None
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    logits = normed @ weight.double().t()
    found = picked(register_head(x, norm, weight, ids), 5000)
    columns = found if ids is None else torch.searchsorted(ids, found)
    if ids is not None:
        assert torch.equal(ids[columns], found)
    assert 900 not in columns.tolist()
    # Of logits that bfloat16 cannot tell apart either may be the one.
    assert (logits.gather(1, columns[:, None])[:, 0] >= logits.max(-1).values * (1 - 2**-6)).all()


@pytest.mark.parametrize("format", [pytest.param(name, marks=on_card) for name in CODES if name != "bfloat16"])
def test_a_head_of_codes_chooses_as_the_one_they_stand_for(format):
    bits, offsets = CODES[format]
    weight = quantize(torch.randn(1000, 576, device="cuda"), bits, offsets=offsets)
    x, norm = torch.randn(5, 576, device="cuda").bfloat16(), Norm(torch.ones(576, device="cuda").bfloat16(), 1e-5)
    found, wanted = (register_head(x, norm, head) for head in (weight, dequantize(weight, torch.bfloat16)))
    assert torch.equal(found.best_NC, wanted.best_NC)
    assert torch.equal(found.ids_NC, wanted.ids_NC)


@compiles
@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("mapped", [False, True])
def test_it_compiles_for_hopper_with_one_barrier(mapped, format):
    constants = {"ROWS": 16, "COLUMNS": 32, "CHUNKS": 3, "SIZE": 576, "VOCAB": 49152, "BLOCKS": 1536}
    constants |= {"HAS_IDS": mapped, "PDL": 1, "WARPS": 4}
    kind, types = of_weight(format)
    types |= {"best_ptr": "*fp32", "ids_ptr": "*i32", "target_ids_ptr": "*i64" if mapped else "*i32"}
    assembly = compiled_for_hopper(module._direct_head, constants | kind, types)
    assert assembly.count("bar.sync") == 1
    assert assembly.count("mma.sync") == 48
    assert assembly.index("ld.global") < assembly.index("griddepcontrol.wait")
