"""The unroll must equal attention with a dense mask over the keys of all steps; also which rows are scored."""

from __future__ import annotations

import pytest
import torch

from fledge.training.ttt import TrainBatch, Unroll, attention_with_lse, document_starts, merge_own, packed_mask, step_masks
from tests.tiny import tiny_drafter, tiny_drafter_config

STEPS = 4
DOCUMENT = torch.tensor([[1] * 5 + [2] * 9 + [3] * 6, [1] * 16 + [0] * 4])


def packed_inputs(num_taps: int = 3, size: int = 32):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 128, DOCUMENT.shape, generator=generator)
    positions = torch.arange(DOCUMENT.shape[1]) - document_starts(DOCUMENT)
    taps = [torch.randn(DOCUMENT.numel(), size, generator=generator) for _ in range(num_taps)]
    return tokens, positions, taps


def dense_unroll(drafter, taps, tokens, positions, steps):
    """The reference from the papers: one sequence of all steps' keys, an explicit quadratic mask, one softmax."""
    start, (rows, length), window = document_starts(DOCUMENT), tokens.shape, drafter.config.window
    keys, hidden, state = {}, [], drafter.fuse(taps)
    t = torch.arange(length)
    for step in range(steps):

        def attend(layer, q, k, v, _, step=step):
            k, v = (
                [*old, x.view(rows, length, *x.shape[1:])] for old, x in zip(keys.get(layer, ([], [])), (k, v), strict=True)
            )
            keys[layer] = (k, v)
            masks = []
            for j in range(step + 1):
                if j == 0:
                    mask = (t[None, None, :] <= t[None, :, None]) & (t[None, None, :] >= start[:, :, None])
                else:
                    mask = (t[None, None, :] == t[None, :, None]).expand(rows, -1, -1)
                if window is not None:
                    mask = mask & (t[:, None] + step - (t[None, :] + j) < window)
                masks.append(mask)
            out = torch.nn.functional.scaled_dot_product_attention(
                q.view(rows, length, *q.shape[1:]).transpose(1, 2),
                torch.cat(k, 1).transpose(1, 2),
                torch.cat(v, 1).transpose(1, 2),
                attn_mask=torch.cat(masks, 2)[:, None],
                enable_gqa=True,
            )
            return out.transpose(1, 2).flatten(0, 1)

        out = drafter(tokens.roll(-1 - step, 1).flatten(), state, positions.flatten() + step, attend)
        hidden.append(out.hidden_ND)
        state = out.feedback_ND
    return hidden


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_output": True, "window": 6},
        {"num_layers": 2, "norm_before_residual": True, "norm_before_fc": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", [False, True])
def test_unroll_and_its_gradients_equal_the_dense_mask(flags, recompute):
    drafter = tiny_drafter(tiny_drafter_config(own_embedding=True, **flags)).double().requires_grad_(True)
    tokens, positions, taps = packed_inputs()
    taps = [x.double() for x in taps]
    drafter.rotary.reserve(64)
    masks = step_masks(document_starts(DOCUMENT), STEPS, drafter.config.window, flex=False)
    results = []
    for run in (
        lambda: Unroll(drafter, recompute=recompute)(taps, tokens, positions, masks),
        lambda: dense_unroll(drafter, taps, tokens, positions, STEPS),
    ):
        drafter.zero_grad()
        hidden = run()
        mix = torch.Generator().manual_seed(0)
        sum((x * torch.randn(x.shape, generator=mix)).sum() for x in hidden).backward()
        results.append((hidden, {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}))
    for ours, dense in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)
    assert results[0][1].keys() == results[1][1].keys()
    assert "layers.0.self_attn.qkv_proj.weight" in results[0][1]
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-4, atol=1e-4)


def test_merge_passes_gradcheck():
    torch.manual_seed(0)
    shapes = [(3, 4, 5), (3, 4, 5), (3, 4), (3, 2, 2, 5), (3, 2, 2, 5)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(merge_own, inputs)


def test_rows_are_independent_of_other_documents_and_later_rows():
    drafter = tiny_drafter(tiny_drafter_config(own_embedding=True, norm_output=True))
    tokens, positions, taps = packed_inputs()
    drafter.rotary.reserve(64)
    masks = step_masks(document_starts(DOCUMENT), STEPS, None, flex=False)
    before = Unroll(drafter)(taps, tokens, positions, masks)
    changed = [x.clone() for x in taps]
    for x in changed:
        x[3:5] += 1.0  # the end of the first document
        x[20:] += 1.0  # all of the second row
    after = Unroll(drafter)(changed, tokens, positions, masks)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:3], b[:3])
        assert torch.equal(a[5:20], b[5:20])
        assert not torch.allclose(a[3:5], b[3:5])


@pytest.mark.parametrize("length", [1024, 1000, 130, 5])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("ahead", [0, 3])
def test_block_masks_equal_dense_masks(window, ahead, length):
    document = torch.ones(2, length, dtype=torch.long)
    document[0, length // 10 :], document[0, length // 2 :], document[0, length - 24 :] = 2, 3, 0
    start = document_starts(document)
    dense = packed_mask(start, window, ahead, flex=False)
    blocks = packed_mask(start, window, ahead, flex=True)
    count = -(-length // 128)

    def in_blocks(beyond: bool) -> torch.Tensor:
        """The dense mask in blocks of 128. `beyond`: the value for padding after the last row."""
        padded = torch.full((2, 1, count * 128, count * 128), beyond)
        padded[:, :, :length, :length] = dense
        return padded.view(2, 1, count, 128, count, 128).permute(0, 1, 2, 4, 3, 5).flatten(-2)

    needed, whole = in_blocks(False), in_blocks(True)
    listed = torch.zeros(2, 1, count, count, dtype=torch.bool)
    for counts, indices, is_full in (
        (blocks.kv_num_blocks, blocks.kv_indices, False),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
    ):
        for b in range(2):
            for q in range(count):
                for kv in indices[b, 0, q, : counts[b, 0, q]].tolist():
                    assert not listed[b, 0, q, kv]
                    listed[b, 0, q, kv] = True
                    assert not is_full or whole[b, 0, q, kv].all()
    assert not (needed.any(-1) & ~listed).any()
    b, q, kv = torch.arange(2)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    assert torch.equal(blocks.mask_mod(b, b, q, kv)[:, None], dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("length", [256, 200, 77])
def test_flex_attention_equals_dense_attention(length):
    torch.manual_seed(0)
    document = torch.ones(2, length, dtype=torch.long)
    document[0, length // 3 :] = 2
    start = document_starts(document)
    results = []
    for flex in (True, False):
        torch.manual_seed(1)
        q, k, v = (torch.randn(2 * length, h, 16) for h in (4, 2, 2))
        results.append(attention_with_lse(q, k, v, packed_mask(start, 70, 2, flex=flex), length))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_which_rows_are_scored():
    #           0  1  2  3  4 | 5  6  7 | padding
    document = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    loss = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0]])
    batch = TrainBatch.plan(torch.zeros_like(loss), torch.zeros_like(loss), document, loss, steps=3, multiple=8)
    assert batch.scored_R.tolist() == [2, 3, 5, 6, 0, 0, 0, 0]  # x_5 starts a document: no row predicts it
    # Step j scores row s−1−j: s=2 has rows 1, 0; s=3 has 2, 1, 0; s=5 none; s=6 has row 5.
    assert batch.valid_KR[:, :4].tolist() == [[1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 0]]
    assert not batch.valid_KR[:, 4:].any()
    assert batch.num_valid_K.tolist() == [3, 2, 1]


def test_a_batch_without_loss_still_has_a_full_chunk():
    zeros = torch.zeros(1, 8, dtype=torch.long)
    batch = TrainBatch.plan(zeros, zeros, zeros + 1, zeros, steps=2, multiple=4)
    assert len(batch.scored_R) == 4
    assert batch.num_valid_K.tolist() == [0, 0]


def test_positions_whose_token_is_outside_the_draft_vocabulary_carry_no_loss():
    """They are left out of the average and counted separately, as misses in the accuracy."""
    tokens, positions, _ = packed_inputs()
    loss = DOCUMENT > 0
    inside = torch.arange(128) % 3 > 0
    everything = TrainBatch.plan(tokens, positions, DOCUMENT, loss, STEPS, multiple=1)
    masked = TrainBatch.plan(tokens, positions, DOCUMENT, loss, STEPS, multiple=1, vocabulary_V=inside)
    flat = tokens.flatten()
    expected = [s for s in everything.scored_R.tolist() if inside[flat[s + 1]]]
    assert 0 < len(expected) < len(everything.scored_R)
    assert masked.scored_R.tolist() == expected
    assert torch.equal(masked.num_valid_K, masked.valid_KR.sum(1).float())
    assert torch.equal(masked.num_valid_K + masked.num_outside_K, everything.num_valid_K)
    assert not everything.num_outside_K.any()
