"""The draft vocabulary: counted from answers, mapped both ways, saved with its provenance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fledge.training.data.chat_files import DataError
from fledge.training.data.samples import Sample, SampleSet
from fledge.training.data.vocabulary import DraftVocabulary

SPECIAL = 2


def samples_with(answers: list[int], prompt: tuple[int, ...] = (90, 91, 92)) -> SampleSet:
    tokens = np.array([*prompt, *answers], np.int32)
    return SampleSet.from_samples([Sample(tokens, np.arange(len(tokens)) >= len(prompt))])


ANSWERS = samples_with([50] * 5 + [10] * 4 + [70] * 3 + [30] * 2 + [SPECIAL])


def test_has_most_frequent_answer_tokens_and_special_tokens():
    vocabulary = DraftVocabulary.count(ANSWERS, 4, vocab_size=100, always=[SPECIAL, 3])
    assert vocabulary.token_ids.tolist() == [SPECIAL, 10, 50, 70]  # 30 is displaced; 3 does not occur; no prompt tokens
    assert vocabulary.token_ids.dtype == np.int64
    assert vocabulary.coverage == pytest.approx(13 / 15)
    assert DraftVocabulary.count(ANSWERS, 4, vocab_size=100).token_ids.tolist() == [10, 30, 50, 70]


def test_maps_between_draft_and_target_ids():
    vocabulary = DraftVocabulary.count(ANSWERS, 4, vocab_size=100, always=[SPECIAL])
    draft = torch.arange(4)
    assert (draft + vocabulary.d2t()).tolist() == vocabulary.token_ids.tolist()
    assert vocabulary.d2t().dtype == torch.int64


def test_fills_up_to_the_size_asked_for():
    vocabulary = DraftVocabulary.count(ANSWERS, 8, vocab_size=100)
    assert vocabulary.token_ids.tolist() == [0, 1, 2, 3, 10, 30, 50, 70]
    assert vocabulary.coverage == 1.0
    with pytest.raises(DataError, match="101"):
        DraftVocabulary.count(ANSWERS, 101, vocab_size=100)
    with pytest.raises(DataError, match="another model"):
        DraftVocabulary.count(ANSWERS, 4, vocab_size=60)


def test_coverage_of_held_out_answers():
    vocabulary = DraftVocabulary.count(ANSWERS, 2, vocab_size=100)
    assert vocabulary.coverage_of(samples_with([50, 10, 11, 12])) == 0.5


def test_saved_and_loaded(tmp_path):
    vocabulary = DraftVocabulary.count(ANSWERS, 4, 100, data_hash="data", tokenizer_hash="tokens")
    vocabulary.save(tmp_path / "run" / "vocabulary")
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["vocabulary.json", "vocabulary.npz"]
    loaded = DraftVocabulary.load(tmp_path / "run" / "vocabulary.json")
    assert loaded.token_ids.tolist() == vocabulary.token_ids.tolist()
    assert loaded.coverage == vocabulary.coverage
    assert loaded.provenance == vocabulary.provenance


@pytest.mark.parametrize(
    ("asked", "name"),
    [({"data_hash": "new"}, "training data"), ({"tokenizer_hash": "new"}, "tokenizer"), ({"vocab_size": 99}, "size")],
)
def test_other_data_tokenizer_or_size_is_refused(asked, name):
    vocabulary = DraftVocabulary.count(ANSWERS, 4, 100, data_hash="data", tokenizer_hash="tokens")
    vocabulary.check(data_hash="data", tokenizer_hash="tokens", vocab_size=100)
    with pytest.raises(DataError, match=name):
        vocabulary.check(**asked)


def test_reuse_for_other_data_is_recorded():
    vocabulary = DraftVocabulary.count(ANSWERS, 2, 100, data_hash="data", tokenizer_hash="tokens")
    other = vocabulary.for_data(samples_with([50, 10, 11, 12]), "other")
    assert other.token_ids.tolist() == vocabulary.token_ids.tolist()
    assert other.coverage == 0.5
    assert (other.provenance["counted_on"], other.provenance["data_hash"]) == ("data", "other")


def test_damaged_or_mixed_files_are_refused(tmp_path):
    DraftVocabulary.count(ANSWERS, 4, 100).save(tmp_path / "a")
    DraftVocabulary.count(ANSWERS, 3, 100).save(tmp_path / "b")
    (tmp_path / "a.npz").write_bytes((tmp_path / "b.npz").read_bytes())
    with pytest.raises(DataError, match="do not belong together"):
        DraftVocabulary.load(tmp_path / "a")
    (tmp_path / "b.npz").write_bytes(b"PK broken")
    with pytest.raises(DataError, match="damaged"):
        DraftVocabulary.load(tmp_path / "b")
    with pytest.raises(DataError, match="missing"):
        DraftVocabulary.load(tmp_path / "c")
