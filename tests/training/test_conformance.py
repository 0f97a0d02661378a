"""Training step k equals serving step k: the unroll and the engine's drafter, token by token, give the same results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fledge.config import MLAConfig, RopeConfig
from fledge.kernels.attention.paged import PagedKV, SequenceLayout
from fledge.sampling import SamplingParams
from fledge.speculation.depth import DepthPolicy
from fledge.speculation.methods.base import AcceptedSpan
from fledge.speculation.methods.eagle import EagleSpeculator
from fledge.training.ttt import Unroll, document_starts, step_masks
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

STEPS, LENGTH = 5, 24
EAGLE31 = {"fc_norm": True, "norm_output": True}
MLA = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=20)
YARN = RopeConfig(theta=1e3, kind="yarn", factor=4.0, original_max_positions=16, mscale=1.0, mscale_all_dim=0.7)

VARIANTS = {
    "EAGLE 3": {},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "fc_norm alone": {"fc_norm": True},
    "norm_output alone": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True, "norm_output": True},
    "3.1, window": {"fc_norm": True, "norm_output": True, "window": 7},
    "3, window": {"window": 7},
    "3.1, two layers": {"fc_norm": True, "norm_output": True, "num_layers": 2},
    "3.1, two layers, window": {"fc_norm": True, "norm_output": True, "num_layers": 2, "window": 9},
    "3.1, small vocabulary": {"fc_norm": True, "norm_output": True, "draft_vocab_size": 40},
    "3.1, norms on queries and keys": {**EAGLE31, "qk_norm": True},
    "3, latent attention": {"mla": replace(MLA, q_lora_rank=None)},
    "3.1, latent attention": {**EAGLE31, "mla": MLA, "rope": YARN},
    "3.1, latent attention, two layers, window": {**EAGLE31, "mla": MLA, "num_layers": 2, "window": 9},
}


class Text:
    """The attributes of a request that the drafter reads."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.pages = tokens, list(range(8))
        self.params, self.generator = SamplingParams(temperature=0.0), None


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())
def test_training_step_equals_serving_step(flags):
    # In fp64: the tiny networks have large weights, and in fp32 rounding alone grows to 1e-3 within a few steps.
    decoder = tiny_decoder().double()
    drafter = tiny_drafter(tiny_drafter_config(**flags)).double().share(decoder.embed_tokens, decoder.lm_head)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 128, (1, LENGTH), generator=generator)
    taps = [size * torch.randn(LENGTH, 32, generator=generator, dtype=torch.float64) for size in (1.0, 5.0, 20.0)]

    drafter.rotary.reserve(LENGTH + STEPS)
    start = document_starts(torch.ones(1, LENGTH))
    masks = step_masks(start, STEPS, drafter.config.window, flex=False)
    trained = Unroll(drafter)(taps, tokens, torch.arange(LENGTH)[None], masks)

    config = drafter.config
    for row in range(LENGTH - 1 - STEPS):
        cache = PagedKV(config.num_layers, config.num_kv_heads, config.head_dim, 8, 8, torch.float64, "cpu")
        served = EagleSpeculator(drafter, cache, DepthPolicy(STEPS))
        text = Text(tokens[0, : row + 2].tolist())
        hidden, state = served.sync([AcceptedSpan(text, 0, list(range(row + 1)), STEPS)], [tap[: row + 1] for tap in taps])
        hidden, state = hidden[-1:], state[-1:]
        for step in range(STEPS):
            if step:
                position = row + step
                token = [int(tokens[0, row + 1 + step])]
                hidden, state = served.step(token, state, [position], [SequenceLayout(text.pages, 1, position + 1)])
            torch.testing.assert_close(trained[step][row], hidden[0], rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(drafter.logits(trained[step][row]), drafter.logits(hidden[0]), rtol=1e-8, atol=1e-8)


def test_wrong_feedback_changes_the_second_step():
    """Shows that the comparison can fail: feeding back the other state changes the second step."""
    tokens = torch.arange(LENGTH)[None]
    taps = [torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    masks = step_masks(document_starts(torch.ones(1, LENGTH)), 2, None, flex=False)
    results = []
    for norm_output in (False, True):
        drafter = tiny_drafter(tiny_drafter_config(own_embedding=True, norm_output=norm_output))
        drafter.rotary.reserve(LENGTH + 2)
        results.append(Unroll(drafter)(taps, tokens, torch.arange(LENGTH)[None], masks))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert (results[0][1] - results[1][1]).abs().max() > 0.1
