"""The small kernels between the networks of a captured step equal their references."""

from __future__ import annotations

import math

import pytest
import torch

from fledge.kernels.accept import DRAFTED, NOT_A_NUMBER, RowState, accept_reference, accept_triton
from fledge.kernels.bits import (
    KEEP,
    has_bit,
    num_words,
    pack_bits,
    set_bits_,
    set_bits_reference_,
    set_bits_triton_,
    unpack_bits,
)
from fledge.kernels.draft_inputs import (
    draft_inputs_reference,
    draft_inputs_triton,
    fuse_inputs_reference,
    fuse_inputs_triton,
    keep_last_reference,
    keep_last_triton,
)
from fledge.kernels.linear.reference import Norm
from fledge.kernels.sample import PartialArgmax
from fledge.kernels.verify_inputs import verify_inputs_reference, verify_inputs_triton
from tests.kernels.support import KERNELS, device_of_kernels, running, runs_triton

VOCAB = 500


def random_choice(num_rows: int, num_blocks: int, device: str) -> PartialArgmax:
    """A random partial argmax: blocks in order of their ids, some with equal values."""
    best = torch.randn(num_rows, num_blocks).mul(2).round() / 2
    ids = torch.stack([torch.randperm(VOCAB)[:num_blocks].sort().values for _ in range(num_rows)]).int()
    return PartialArgmax(best.to(device), ids.to(device))


def rows(num_rows: int, device: str) -> RowState:
    state = RowState(
        active=(torch.arange(num_rows) % 4 != 3).int(),
        token=torch.randint(0, VOCAB, (num_rows,)),
        length=torch.randint(5, 40, (num_rows,), dtype=torch.int32),
        answered=torch.randint(0, 10, (num_rows,), dtype=torch.int32),
        report=torch.zeros(num_rows, 9, dtype=torch.int32),
        limit=torch.full((num_rows,), 14, dtype=torch.int32),
        min_answer=torch.tensor([0, 3, 12] * num_rows)[:num_rows].int(),
        depth_limit=torch.tensor([9, 9, 1, 9, 0, 2] * num_rows)[:num_rows].int(),
        stop_bits=torch.zeros(num_rows, num_words(VOCAB), dtype=torch.int32),
        tokens=torch.zeros(num_rows, 42, dtype=torch.int32),
    )
    return RowState(*(tensor.to(device) for tensor in state))


def drafts_near(choice: PartialArgmax, num_new: int, device: str) -> torch.Tensor:
    """Drafts that match the target's choice in all or in the first few tokens."""
    top = choice.best_NC == choice.best_NC.amax(-1, keepdim=True)
    chosen = choice.ids_NC.masked_fill(~top, VOCAB).amin(-1).long().view(-1, num_new)
    drafts = torch.zeros(len(chosen), num_new + 2, dtype=torch.int64, device=device)
    for row in range(len(chosen)):
        right = row % (num_new + 1)
        drafts[row, : num_new - 1] = chosen[row, : num_new - 1]
        drafts[row, right:] += 1
    return drafts


def test_acceptance_of_known_rows():
    state = rows(4, "cpu")
    state.length.clamp_(max=30)
    state = state._replace(
        answered=torch.tensor([3, 3, 12, 3], dtype=torch.int32), depth_limit=torch.full((4,), 9, dtype=torch.int32)
    )
    state.min_answer.copy_(torch.tensor([0, 5, 0, 0]))
    set_bits_(state.stop_bits, torch.tensor([1]), torch.tensor([[20, 21, -1]]))  # 20 comes before min_tokens: it does not stop
    chosen = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]], dtype=torch.int32)
    drafts = torch.tensor([[10, 99], [20, 21], [30, 31], [40, 41]])
    lengths = state.length.clone()
    accepted = accept_reference(state, PartialArgmax(torch.zeros(12, 1), chosen.view(12, 1)), drafts, 3, VOCAB)
    # one accepted; a stop token inside the draft; the limit inside the draft; inactive
    assert accepted.counts_B.tolist() == [2, 0, 0, 0]
    assert accepted.starts_B.tolist() == (lengths - 1).tolist()
    assert state.report[:, 0].tolist() == [2, 2, 2, 0]
    assert state.report[:3, 1:3].tolist() == [[10 + DRAFTED, 11], [20 + DRAFTED, 21 + DRAFTED], [30 + DRAFTED, 31 + DRAFTED]]
    texts = [state.tokens[row, length : length + 3].tolist() for row, length in enumerate(lengths.tolist())]
    assert texts == [[10, 11, 0], [20, 21, 0], [30, 31, 0], [0, 0, 0]]
    assert state.active.tolist() == [1, 0, 0, 0]
    assert state.token[:3].tolist() == [11, 21, 31]
    assert (state.length - lengths).tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=runs_triton)])
@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("num_blocks", [1, 7])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("keeps_text", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_accept(kernel, num_new, num_blocks, indexed, keeps_text, broken):
    device = device_of_kernels()
    choice = random_choice(12 * num_new, num_blocks, device)
    drafts = drafts_near(choice, num_new, device)
    if broken:  # NaN logits, in some rows after accepted drafts
        choice.best_NC[num_new - 1 :: 3] = float("nan")
    order = torch.randperm(12, device=device) if indexed else None
    state = rows(12, device)
    state = state if keeps_text else state._replace(tokens=None)
    likely = torch.stack([choice.ids_NC.view(-1)[torch.randperm(choice.ids_NC.numel(), device=device)[:3]] for _ in range(6)])
    set_bits_(state.stop_bits, torch.arange(6, 12, device=device), likely.long())
    twin = RowState(*(None if tensor is None else tensor.clone() for tensor in state))
    expected = accept_reference(twin, choice, drafts, num_new, VOCAB, order)
    found = accept_triton(state, choice, drafts, num_new, VOCAB, order)
    for one, other in zip((*found, *state), (*expected, *twin), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_nan_logits_end_an_answer():
    state = rows(3, "cpu")
    state = state._replace(answered=torch.zeros(3, dtype=torch.int32), depth_limit=torch.full((3,), 9, dtype=torch.int32))
    chosen = torch.tensor([[10, 11], [20, 21], [30, 31]], dtype=torch.int32)
    best = torch.tensor([[0, math.nan], [math.nan, 0], [0, 0]])
    drafts = torch.tensor([[10], [20], [30]])
    accepted = accept_reference(state, PartialArgmax(best.view(6, 1), chosen.view(6, 1)), drafts, 2, VOCAB)
    assert accepted.counts_B.tolist() == [0, 0, 2]
    assert state.active.tolist() == [0, 0, 1]
    assert state.report[:, 0].tolist() == [2, 1, 2]
    assert (state.report[:, 1:3] & NOT_A_NUMBER != 0).tolist() == [[False, True], [True, False], [False, False]]


@pytest.mark.parametrize("kernel", KERNELS)
def test_bits(kernel):
    """The kernel and the reference set exactly the given bits, whatever was set before; ids may repeat."""
    run, device = running(kernel, set_bits_reference_, set_bits_triton_)
    ids = [[0, 31, 31, 499], [32, 63, 64, -1], [-1, -1, -1, -1], [KEEP, -1, -1, -1]]
    bits = torch.full((5, num_words(VOCAB)), -1, dtype=torch.int32, device=device)
    numbers = torch.tensor([[row, 7, *of_row] for row, of_row in zip([3, 0, 4, 2], ids, strict=True)], device=device)
    run(bits, numbers[:, 0], numbers[:, 2:])  # non-contiguous columns, as in the engine
    bits = bits.cpu()
    sets = [set(unpack_bits(bits[row : row + 1], VOCAB)[0].nonzero()[:, 0].tolist()) for row in (3, 0, 4, 1, 2)]
    assert sets == [{0, 31, 499}, {32, 63, 64}, set(), set(range(VOCAB)), set(range(VOCAB))]
    assert has_bit(bits[[3]], torch.tensor([[31, 32, 499]])).tolist() == [[True, False, True]]
    many = torch.randint(0, VOCAB, (2000,)).tolist()[:300]
    packed = torch.from_numpy(pack_bits(many, num_words(VOCAB)))
    assert unpack_bits(packed[None], VOCAB)[0].nonzero()[:, 0].tolist() == sorted(set(many))


@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=runs_triton)])
@pytest.mark.parametrize(("depth", "chosen"), [(0, False), (3, False), (3, True)])
def test_verify_inputs(kernel, depth, chosen):
    device = device_of_kernels()
    state, embedding = rows(6, device), torch.randn(VOCAB, 40, device=device)
    drafts = torch.randint(0, VOCAB, (6, 5), device=device)
    twin = drafts.clone()
    last = random_choice(4, 6, device) if chosen else None
    arguments = (state.length, state.active, embedding, last)
    expected = verify_inputs_reference(4, depth, state.token, twin, *arguments)
    found = verify_inputs_triton(4, depth, state.token, drafts, *arguments)
    for one, other in zip((*found, drafts), (*expected, twin), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=runs_triton)])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_draft_inputs(kernel, step, norm_output, norm_before_residual):
    device = device_of_kernels()
    state, embedding, size = rows(6, device), torch.randn(VOCAB, 40, device=device), 40
    h = torch.randn(5, size, device=device)
    norms = [Norm(torch.randn(size, device=device), 1e-5) for _ in range(3)]
    norms[2] = norms[2] if norm_output else None
    options = {"norm_before_residual": norm_before_residual, "step": step}
    tokens = random_choice(5, 6, device) if step else torch.randint(0, VOCAB, (5,), device=device)
    results = []
    for run in (draft_inputs_reference, draft_inputs_triton):
        drafts = torch.zeros(6, 4, dtype=torch.int64, device=device)
        rest = {"drafts_RD": drafts, "length_R": state.length, "active_R": state.active} if step else {}
        results.append((*run(h, tokens, embedding, *norms, **options, **rest), drafts))
    for one, other in zip(*results, strict=True):
        assert (one is None and other is None) or torch.allclose(one.float(), other.float(), atol=1e-5)


@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=runs_triton)])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_fuse_inputs(kernel, count):
    device = device_of_kernels()
    taps = [torch.randn(5, 40, device=device) for _ in range(count)]
    norms = [Norm(torch.randn(40, device=device), 1e-5) for _ in range(count)]
    torch.testing.assert_close(fuse_inputs_triton(taps, norms), fuse_inputs_reference(taps, None, norms), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=runs_triton)])
def test_keep_last(kernel):
    device = device_of_kernels()
    x, counts = torch.randn(12, 40, device=device), torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    state = torch.randn(6, 40, device=device)
    twin = state.clone()
    keep_last_triton(x, counts, state)
    keep_last_reference(x, counts, twin)
    assert torch.equal(state, twin)
    assert torch.equal(state[2], x[2 * 3 + 1])
