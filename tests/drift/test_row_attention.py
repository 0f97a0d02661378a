"""The rollout's attention of rows, computed in two parts, equals attention over all keys at once."""

from __future__ import annotations

import pytest
import torch

from fledge.drift import rollout as rollout_module
from fledge.drift.rollout import roll_out
from fledge.drift.texts import TargetText
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config


def texts(decoder, taps):
    generator = torch.Generator().manual_seed(3)
    lengths = ((40, 12), (25, 24), (60, 30))  # the second text has no row
    return [
        TargetText.of(decoder, torch.randint(0, 128, (length,), generator=generator).tolist(), start, taps)
        for length, start in lengths
    ]


@pytest.mark.parametrize("window", [None, 9, 40])
@pytest.mark.parametrize("layers", [1, 2])
def test_row_attention_drafts_the_same_tokens(window, layers, monkeypatch):
    decoder = tiny_decoder()
    drafter = tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True, window=window, num_layers=layers))
    drafter.share(decoder.embed_tokens, decoder.lm_head)
    wanted = roll_out(drafter, texts(decoder, drafter.config.aux_layer_ids), 6, probe=False)
    steps = []
    monkeypatch.setattr(rollout_module, "can_attend_rows", lambda q, window, step: steps.append(step) or True)
    found = roll_out(drafter, texts(decoder, drafter.config.aux_layer_ids), 6, probe=False)
    assert max(steps) == 5
    assert torch.equal(found.drafted_MJ, wanted.drafted_MJ)
    torch.testing.assert_close(found.rms_MJ, wanted.rms_MJ, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.cosine_MJ, wanted.cosine_MJ, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 20])
def test_the_fused_kernel_equals_its_reference(window):
    from fledge.drift.probes import text_attention, text_attention_reference

    rows, seen = torch.tensor([3, 0, 17], device="cuda"), torch.tensor([40, 9, 90], device="cuda")
    q = torch.randn(20, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(139, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found, wanted = (run(q, k, v, rows, seen, window, 2) for run in (text_attention, text_attention_reference))
    torch.testing.assert_close(found[0], wanted[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1].float(), wanted[1], atol=2e-2, rtol=2e-2)
