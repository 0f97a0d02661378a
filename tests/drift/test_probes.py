"""The probes on constructed drafters whose attention and state sizes are known exactly."""

from __future__ import annotations

import pytest
import torch

from fledge.drift.probes import ATTENTION, attention_figures, find_sink, rms, slope
from fledge.drift.rollout import roll_out
from fledge.drift.texts import TargetText
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

LENGTH, ANSWER, DEPTH, SINK = 20, 8, 6, 1
ROWS = torch.arange(ANSWER - 1, LENGTH - 2)  # rows that draft


def text(seed: int = 3, length: int = LENGTH) -> TargetText:
    generator = torch.Generator().manual_seed(seed)
    taps = [torch.randn(length, 32, generator=generator) * size for size in (1.0, 5.0, 20.0)]
    tokens = torch.randint(0, 128, (length,), generator=generator)
    return TargetText(tokens, ANSWER, taps, torch.randn(length, 32, generator=generator))


def uniform_drafter(**flags):
    """A drafter with queries of zero, so that every visible key gets the same attention."""
    drafter = tiny_drafter(tiny_drafter_config(own_embedding=True, **flags))
    for layer in drafter.layers:
        attention = layer.self_attn
        attention.qkv_proj.weight[: attention.num_heads * attention.head_dim] = 0
    return drafter


def still_drafter(**flags):
    """A drafter whose attention and MLP add nothing: a state passes through unchanged up to the final norm."""
    drafter = tiny_drafter(tiny_drafter_config(own_embedding=True, **flags))
    layer = drafter.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    return drafter


def column(figures, name):
    return figures[..., ATTENTION.index(name)]


def test_uniform_attention_gives_exact_shares():
    result = roll_out(uniform_drafter(), text(), DEPTH, sink=SINK)
    row = ROWS.double()
    for step, figures in enumerate(result.attention):
        keys = row + 1 + step  # columns 0 … t, and one own key for each step since
        expected = {
            "sink": 1 / keys,
            "prompt": torch.minimum(row, torch.tensor(float(ANSWER))).sub(1) / keys,
            "answer": (row - ANSWER).clamp_min(0) / keys,
            "own": (1 + step) / keys,
            "drafted": step / keys,
            "entropy": keys.log(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(column(figures, name), value.float()[:, None].expand(-1, 4), rtol=1e-5, atol=1e-6)


def test_a_window_excludes_the_sink():
    window = 5
    result = roll_out(uniform_drafter(window=window), text(), DEPTH, sink=SINK)
    for step, figures in enumerate(result.attention):
        assert column(figures, "sink").abs().max() == 0
        torch.testing.assert_close(
            column(figures, "own"), torch.full_like(column(figures, "own"), min(1 + step, window) / window)
        )


def test_all_attention_on_one_key():
    """All of a head's attention is on one key: own, drafted or the sink."""
    p = torch.zeros(2, 3, 9)
    p[0, :, 4], p[1, 0, 1], p[1, 1:, 8] = 1, 1, 1
    figures = attention_figures(p, torch.tensor([4, 6]), sink=1, prompt_length=3)
    assert column(figures, "own").tolist() == [[1, 1, 1], [0, 1, 1]]
    assert column(figures, "drafted").tolist() == [[0, 0, 0], [0, 1, 1]]
    assert column(figures, "sink").tolist() == [[0, 0, 0], [1, 0, 0]]
    assert column(figures, "entropy").abs().max() == 0


@pytest.mark.parametrize("fc_norm", [False, True])
def test_norm_output_fixes_the_fed_back_size(fc_norm):
    drafter = tiny_drafter(tiny_drafter_config(own_embedding=True, fc_norm=fc_norm, norm_output=True))
    drafter.norm.weight.fill_(1)
    result = roll_out(drafter, text(), DEPTH)
    torch.testing.assert_close(result.rms_MJ, torch.ones_like(result.rms_MJ), rtol=1e-4, atol=1e-4)


def test_an_unchanged_state_keeps_its_size():
    one = text()
    drafter = still_drafter()
    expected = rms(drafter.fuse(one.taps))[ROWS]
    result = roll_out(drafter, one, DEPTH)
    torch.testing.assert_close(result.rms_MJ, expected[:, None].expand(-1, DEPTH))


class Doubling(torch.nn.Module):
    def forward(self, x, ops, norm, output_norm):
        return x + x


def test_a_residual_that_doubles_doubles_the_rms():
    """Attention adds nothing; in the MLP's place a module adds the residual once more."""
    drafter = still_drafter()
    layer = drafter.layers[0]
    layer.mlp = Doubling()
    result = roll_out(drafter, text(), DEPTH)
    ratio = result.rms_MJ[:, 1:] / result.rms_MJ[:, :-1]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 2.0), rtol=1e-4, atol=1e-4)


def test_cosine_is_measured_with_the_targets_state():
    """Every position has the same taps and the state passes unchanged, so it equals the target's state at every depth."""
    one = text()
    same = TargetText(one.tokens_T, ANSWER, [tap[:1].expand(LENGTH, -1) for tap in one.taps], one.hidden_TD)
    result = roll_out(still_drafter(), same, DEPTH)
    torch.testing.assert_close(result.cosine_MJ, torch.ones_like(result.cosine_MJ))
    drafter = still_drafter()
    shifted = roll_out(drafter, one, 1)
    fused = drafter.fuse(one.taps)
    torch.testing.assert_close(shifted.cosine_MJ[:, 0], torch.cosine_similarity(fused[ROWS], fused[ROWS + 1]))


def test_noise_has_the_given_size():
    one = text(length=400)
    clean, noisy = (roll_out(still_drafter(), one, 1, noise=noise).rms_MJ[:, 0] for noise in (0.0, 0.75))
    assert float((noisy / clean).square().mean()) == pytest.approx(1 + 0.75**2, rel=0.03)


def test_slope_of_a_line():
    assert slope([1.0, 3.0, 5.0, 7.0]) == pytest.approx(2.0)
    assert slope([4.0]) == 0.0


def decoder_with_sink(pivot, **sizes):
    """A decoder whose queries all have one direction, and where only the token `pivot` has a key in that direction."""
    decoder = tiny_decoder(**sizes)
    config = decoder.config
    queries = config.num_heads * config.head_dim
    for layer in decoder.layers:
        layer.self_attn.qkv_proj.weight.zero_()
    decoder.embed_tokens.weight.normal_(0, 0.01)
    decoder.embed_tokens.weight[:, 0] = 1.0  # all tokens: the query's direction
    decoder.embed_tokens.weight[pivot, 1] = 3.0  # one token: the key's direction
    for layer in decoder.layers:
        layer.input_layernorm.weight.fill_(1)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        # The last component of a head rotates slowest under the rotary embedding: it hardly changes over a short text.
        for head in range(config.num_heads):
            layer.self_attn.qkv_proj.weight[head * config.head_dim + 3, 0] = 4.0
        for head in range(config.num_kv_heads):
            layer.self_attn.qkv_proj.weight[queries + head * config.head_dim + 3, 1] = 4.0
    return decoder


def test_find_sink_returns_the_sinks_column():
    pivot = 77
    decoder = decoder_with_sink(pivot, num_layers=2)
    texts = [[5, 9, pivot, *range(10, 40)], [7, 8, pivot, *range(40, 75)]]
    sink = find_sink(decoder, texts)
    assert sink.column == 2
    assert sink.clear
    assert sink.share > 0.9
