"""Packed batches: every answer token once per epoch, deterministic for a seed, resumable at any batch."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from fledge.training.data.chat_files import DataError
from fledge.training.data.packing import PackedBatch, PackedLoader, pack
from fledge.training.data.samples import Sample, SampleSet


def make_samples(count: int = 60, longest: int = 60, seed: int = 0) -> SampleSet:
    """Samples whose tokens all differ, so that a batch shows where each came from. The second half is the answer."""
    random, first, samples = np.random.default_rng(seed), 1, []
    for _ in range(count):
        length = int(random.integers(4, longest))
        tokens = np.arange(first, first + length, dtype=np.int32)
        samples.append(Sample(tokens, np.arange(length) >= length // 2))
        first += length
    return SampleSet.from_samples(samples)


def epoch_of(loader: PackedLoader) -> list[PackedBatch]:
    return list(islice(loader, loader.batches_per_epoch))


def equal(a: PackedBatch, b: PackedBatch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "positions", "document", "loss_mask"))


def test_rows_hold_whole_documents_in_order():
    samples = make_samples()
    batch = next(PackedLoader(samples, sequence_length=64, micro_batch_size=4, seed=0))
    assert batch.tokens.shape == (4, 64)
    assert (batch.tokens.dtype, batch.document.dtype) == (torch.int64, torch.int32)
    starts = {int(samples.tokens[offset]): i for i, offset in enumerate(samples.offsets[:-1])}
    for row in range(4):
        documents = batch.document[row]
        assert documents[0] == 1
        for number in range(1, int(documents.max()) + 1):
            here = documents == number
            sample = samples[starts[int(batch.tokens[row, here][0])]]
            assert batch.tokens[row, here].tolist() == sample.tokens.tolist()
            assert batch.positions[row, here].tolist() == list(range(len(sample)))
            assert batch.loss_mask[row, here].tolist() == sample.loss_mask.tolist()
        padding = documents == 0
        assert not batch.loss_mask[row, padding].any()
        assert not padding[: int((~padding).sum())].any()  # at the end only


def test_an_epoch_has_every_answer_token_once():
    samples = make_samples()
    loader = PackedLoader(samples, sequence_length=64, micro_batch_size=1, seed=0)
    learnt = torch.cat([batch.tokens[batch.loss_mask] for batch in epoch_of(loader)])
    assert sorted(learnt.tolist()) == samples.answer_ids().tolist()
    assert loader.epoch == 1.0


def test_long_sample_is_cut_at_the_end_of_its_row():
    tokens = np.arange(1, 301, dtype=np.int32)
    loader = PackedLoader([Sample(tokens, tokens > 50)], sequence_length=64, micro_batch_size=1, seed=0)
    (batch,) = epoch_of(loader)
    assert batch.tokens[0].tolist() == list(range(1, 65))
    assert int(batch.loss_mask.sum()) == 14


def test_the_first_token_of_a_document_is_never_predicted():
    sample = Sample(np.array([1, 2, 3], np.int32), np.ones(3, bool))
    batch = next(PackedLoader([sample, sample], sequence_length=6, micro_batch_size=1, seed=0))
    assert batch.loss_mask.tolist() == [[False, True, True, False, True, True]]
    with pytest.raises(DataError, match="empty"):
        PackedLoader([Sample(np.array([1, 2], np.int32), np.array([True, False]))], 8, 1, seed=0)


def test_shuffled_by_seed_and_epoch_alone():
    samples = make_samples()
    first, second = (PackedLoader(samples, 64, 2, seed=5) for _ in range(2))
    both = [(next(first), next(second)) for _ in range(2 * first.batches_per_epoch + 3)]
    assert all(equal(a, b) for a, b in both)
    assert not equal(both[0][0], both[first.batches_per_epoch][0])  # another epoch
    assert not equal(both[0][0], next(PackedLoader(samples, 64, 2, seed=6)))


@pytest.mark.parametrize("after", [0, 3, 11, 25])
def test_resumes_exactly(after):
    samples = make_samples()
    settings = {"sequence_length": 64, "micro_batch_size": 2, "seed": 1, "position_offset_max": 100}
    loader = PackedLoader(samples, **settings)
    list(islice(loader, after))
    state = loader.state_dict()
    expected = list(islice(loader, 2 * loader.batches_per_epoch))
    resumed = PackedLoader(samples, **settings)
    resumed.load_state_dict(state)
    assert resumed.epoch == pytest.approx(after / loader.batches_per_epoch, abs=0.2)
    assert all(equal(a, b) for a, b in zip(expected, resumed, strict=False))


def test_resuming_with_other_settings_is_refused():
    samples = make_samples()
    state = PackedLoader(samples, 64, 2, seed=1).state_dict()
    with pytest.raises(DataError, match="seed was 1, now it is 2"):
        PackedLoader(samples, 64, 2, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="global_batch_size was 2, now it is 4"):
        PackedLoader(samples, 64, 2, seed=1, world_size=2).load_state_dict(state)


@pytest.mark.parametrize(("micro", "world"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_rows_of_a_step_do_not_depend_on_number_of_ranks(micro, world):
    """So a run can resume with another number of ranks, also in the middle of an epoch."""
    samples = make_samples()
    one = PackedLoader(samples, 64, 2, seed=1, global_batch_size=4)
    list(islice(one, 6))
    ranks = [PackedLoader(samples, 64, micro, 1, rank, world, global_batch_size=4) for rank in range(world)]
    for rank in ranks:
        rank.load_state_dict(one.state_dict())
    for _ in range(2 * one.steps_per_epoch):
        expected = torch.cat([next(one).tokens for _ in range(one.batches_per_step)])
        taken = [next(rank).tokens for _ in range(ranks[0].batches_per_step) for rank in ranks]
        assert torch.equal(torch.cat(taken), expected)
    assert {rank.epoch for rank in ranks} == {one.epoch}


def test_ranks_share_an_epoch_without_overlap():
    samples = make_samples()
    whole = PackedLoader(samples, 64, 6, seed=0)
    ranks = [PackedLoader(samples, 64, 2, seed=0, rank=rank, world_size=3) for rank in range(3)]
    assert {rank.batches_per_epoch for rank in ranks} == {whole.batches_per_epoch}
    for batch in epoch_of(whole):  # a step of three ranks equals a step of one rank with three times the rows
        assert torch.equal(batch.tokens, torch.cat([next(rank).tokens for rank in ranks]))


def test_position_offsets():
    samples = make_samples()
    plain = next(PackedLoader(samples, 64, 4, seed=0))
    moved = next(PackedLoader(samples, 64, 4, seed=0, position_offset_max=1000))
    assert torch.equal(plain.tokens, moved.tokens)
    shifts = {
        tuple((moved.positions - plain.positions)[row][plain.document[row] == number].unique().tolist())
        for row in range(4)
        for number in range(1, int(plain.document[row].max()) + 1)
    }
    assert all(len(shift) == 1 and 0 <= shift[0] <= 1000 for shift in shifts)  # one offset per document
    assert len(shifts) > 3


def test_too_little_data_for_a_step_is_refused():
    with pytest.raises(DataError, match=r"one step takes 512.*micro_batch_size"):
        PackedLoader(make_samples(), 64, 256, seed=0, world_size=2)


def test_packing_is_tight_and_complete():
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.5, 0.8, 20_000), 8, 2048).astype(np.int64)
    rows = pack(lengths, random.permutation(len(lengths)), 2048)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    assert max(lengths[row].sum() for row in rows) <= 2048
    assert lengths.sum() / (len(rows) * 2048) > 0.98
    loader = PackedLoader(make_samples(400), 64, 1, seed=0)
    assert loader.fill_rate == pytest.approx(np.mean([int((batch.document > 0).sum()) / 64 for batch in epoch_of(loader)]))
    assert f"{loader.fill_rate:.1%} full" in str(loader)
