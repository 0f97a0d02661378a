"""Rollouts over known texts give the engine's acceptance counts, alone and in groups, greedy and sampled."""

from __future__ import annotations

import pytest
import torch

from fledge.drift.metrics import Count, acceptance_length, by_text, counted, expected_walk, length_ratio, walk
from fledge.drift.probes import ATTENTION
from fledge.drift.rollout import Rollout, roll_out, target_probabilities
from fledge.drift.texts import TargetText, in_groups
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.sampling import SamplingParams
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

VOCABULARY = 5  # so small that a random drafter is sometimes right
PROMPTS = [[1, 4, 2, 3], [1, 2, 3, 4, 0, 1, 2], [0, 3, 2], [4, 1]]
NEW_TOKENS = 24
VARIANTS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_output": True, "window": 12, "draft_vocab_size": 4},
    {"fc_norm": True, "norm_output": True, "num_layers": 2},
]


def pair(**flags):
    decoder = tiny_decoder(max_positions=2048, vocab_size=VOCABULARY)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, **flags))
    return decoder, drafter.share(decoder.embed_tokens, decoder.lm_head)


def served(decoder, drafter, depth):
    engine = build_engine(decoder, Speculation(drafter, depth).fixed_depth(), EngineConfig(dtype="float32"))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.step()
    return requests


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_counts_equal_the_engines(flags):
    decoder, drafter = pair(**flags)
    accepted = 0
    for depth in (2, 5):
        for request in served(decoder, drafter, depth):
            text = TargetText.of(decoder, request.tokens, len(request.prompt), drafter.config.aux_layer_ids)
            stats = walk(roll_out(drafter, text, 5, probe=False).matched_M, depth)
            assert (stats.accepted, stats.steps) == (request.stats.accepted, request.stats.steps)
            accepted += stats.accepted
    assert accepted >= 5


def texts_of(decoder, drafter, depth=3):
    return [
        TargetText.of(decoder, one.tokens, len(one.prompt), drafter.config.aux_layer_ids)
        for one in served(decoder, drafter, depth)
    ]


def assert_same(ours: Rollout, theirs: list[Rollout], skip: list[int] | None = None) -> None:
    """Equal up to rounding, which may decide a tie between two drafts: the few rows with other drafts are left out."""
    skip = skip or [0] * len(theirs)

    def joined(name):
        return torch.cat([getattr(one, name)[rows:] for one, rows in zip(theirs, skip, strict=True)])

    same = (ours.drafted_MJ == joined("drafted_MJ")).all(1)
    assert same.float().mean() > 0.95
    for name in ("accept_prob_MJ", "inside_MJ", "rms_MJ", "cosine_MJ", "cosine_hidden_MJ"):
        torch.testing.assert_close(getattr(ours, name)[same], joined(name)[same], rtol=1e-3, atol=1e-3)
    for step, figures in enumerate(ours.attention):
        expected = torch.cat([one.attention[step][rows:] for one, rows in zip(theirs, skip, strict=True)])
        for name in ("sink", "own", "drafted", "entropy"):
            at = ATTENTION.index(name)
            torch.testing.assert_close(figures[same][..., at], expected[same][..., at], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_a_group_of_texts_rolls_out_like_each_alone(flags):
    decoder, drafter = pair(**flags)
    texts = texts_of(decoder, drafter)
    together = roll_out(drafter, texts, 6, sink=1)
    assert together.text_M.tolist() == [number for number, text in enumerate(texts) for _ in range(text.num_rows)]
    assert_same(together, [roll_out(drafter, text, 6, sink=1) for text in texts])


@pytest.mark.parametrize("layers", [1, 2])
def test_columns_outside_the_window_do_not_matter(layers):
    """Columns that no row can attend to are left out; with rows from the first token on, none are."""
    decoder, drafter = pair(window=3, num_layers=layers)
    text = texts_of(decoder, drafter)[1]
    assert text.answer_start > 3 * layers
    early = TargetText(text.tokens_T, 1, text.taps, text.hidden_TD)
    assert_same(roll_out(drafter, text, 6, sink=1), [roll_out(drafter, early, 6, sink=1)], [text.answer_start - 1])


def test_texts_of_similar_length_are_grouped():
    groups = list(in_groups([5, 90, 6, 200, 7], room=100))
    assert groups == [[0, 2, 4], [1], [3]]


def test_chunks_of_rows_do_not_change_results(monkeypatch):
    decoder, drafter = pair()
    request = served(decoder, drafter, 3)[0]
    text = TargetText.of(decoder, request.tokens, len(request.prompt), drafter.config.aux_layer_ids)
    whole = roll_out(drafter, text, 4)
    monkeypatch.setattr("fledge.drift.rollout.PROBABILITIES_AT_ONCE", 500)
    chunked = roll_out(drafter, text, 4)
    assert whole.drafted_MJ.tolist() == chunked.drafted_MJ.tolist()
    for one, other in zip(whole.attention, chunked.attention, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("flags", VARIANTS[1:3], ids=str)
def test_expected_sampled_acceptance_equals_the_engines(flags):
    """Many sampled runs of the engine, against the expectation computed on texts sampled from the target alone."""
    decoder, drafter = pair(**flags)
    temperature, depth, count, size = 0.7, 3, 300, 8

    def run(speculation):
        engine = build_engine(decoder, speculation, EngineConfig(dtype="float32", max_num_seqs=64))
        for seed in range(count):
            params = SamplingParams(temperature=temperature, max_tokens=size, ignore_eos=True, seed=seed)
            requests.append(engine.add_request(PROMPTS[1], params))
        while engine.has_unfinished():
            engine.step()

    requests: list = []
    run(Speculation(drafter, depth).fixed_depth())
    served_counts = [Count(one.stats.accepted, one.stats.steps) for one in requests]
    requests.clear()
    run(Speculation(None))
    texts = [TargetText.of(decoder, one.tokens, len(one.prompt), drafter.config.aux_layer_ids) for one in requests]
    p = target_probabilities(decoder, texts, depth, temperature)
    rollout = roll_out(drafter, texts, depth, temperature=temperature, target_p=p, probe=False)
    expected_counts = [one.counts[depth] for one in by_text(rollout, len(texts), [depth], sampled=True)]
    ours, theirs = acceptance_length(expected_counts), acceptance_length(served_counts)
    assert ours.value > 1.1
    assert abs(ours.value - theirs.value) < 4.5 * (ours.error**2 + theirs.error**2) ** 0.5
    assert ours.error < theirs.error  # the expectation removes the randomness of drafts


def test_target_probabilities_equal_the_heads():
    decoder, drafter = pair()
    text = texts_of(decoder, drafter)[1]
    p = target_probabilities(decoder, [text, text], 3, 0.5)
    assert p.shape == (2 * text.num_rows, 3)
    row, step = 4, 2
    at = text.answer_start - 1 + row + step + 1
    probabilities = (decoder.logits(text.hidden_TD[at]) / 0.5).softmax(-1)
    assert float(p[text.num_rows + row, step]) == pytest.approx(float(probabilities[text.tokens_T[at + 1]]), rel=1e-4)
    assert p[text.num_rows - 1, 1:].tolist() == [1, 1]


def test_expected_walk_covers_every_path():
    """Computed by hand: depth 2, three rows. From row 0: 0 accepted (1/2) -> row 1; 1 (1/4) -> row 2; 2 (1/4) -> the end."""
    accept_prob = [[0.5, 0.5], [0.0, 0.0], [0.25, 0.0]]
    count = expected_walk(accept_prob, 2)
    assert count.steps == pytest.approx(1 + 0.5 + (0.25 + 0.5))
    assert count.accepted == pytest.approx(0.5 + 0.25 + 0.75 * 0.25)


def test_expected_walk_of_certain_drafts_equals_walk():
    generator = torch.Generator().manual_seed(5)
    accept_prob = torch.rand(40, 4, generator=generator) < 0.6
    matched = accept_prob.long().cumprod(1).sum(1).tolist()
    for depth in (1, 2, 4):
        whole = walk(matched, depth)
        assert expected_walk(accept_prob.double().tolist(), depth) == pytest.approx((whole.accepted, whole.steps))
        assert counted(matched, depth) == (whole.accepted, whole.steps)


def test_standard_errors():
    counts = [Count(2, 1), Count(0, 1), Count(2, 1), Count(0, 1)]
    estimate = acceptance_length(counts)
    assert estimate.value == 2
    assert estimate.error == pytest.approx((4 / 3 * 4 * (1 / 4) ** 2) ** 0.5)  # the error of the mean of 2, 0, 2, 0
    doubled = [Count(3, 1), Count(1, 1), Count(3, 1), Count(1, 1)]
    assert length_ratio(counts, counts) == (1, 0)  # variation common to a pair cancels
    assert length_ratio(doubled, counts).value == pytest.approx(3 / 2)
    assert length_ratio(doubled, counts).error < length_ratio(doubled, counts[::-1]).error * 1.01
    assert acceptance_length(counts[:1]).error is None


def test_walk_counts_positions():
    #              row: 0  1  2  3  4  5
    stats = walk([2, 9, 9, 0, 1, 0], depth=5)  # accepts 2, then 0, then 1
    assert (stats.accepted, stats.steps, stats.emitted) == (3, 3, 6)
    assert stats.accepted_at == [2, 1, 0, 0, 0]
    assert counted([2, 9, 9, 0, 1, 0], depth=1) == (3, 3)  # one each from rows 0, 2 and 4
    assert counted([0, 3, 0, 0, 0], depth=2) == (2, 3)  # from row 0 none, from row 1 two, from row 4 none
    assert counted([], depth=3) == (0, 0)


def test_a_text_without_rows_has_no_counts():
    decoder, drafter = pair(fc_norm=True)
    texts = texts_of(decoder, drafter)
    short = TargetText.of(decoder, [1, 2, 3], 2, drafter.config.aux_layer_ids)
    assert len(roll_out(drafter, short, 3).drafted_MJ) == 0
    both = by_text(roll_out(drafter, [short, texts[0]], 3), 2, [3])
    assert both[0].counts[3] == (0, 0)
    assert both[1].counts == by_text(roll_out(drafter, texts[0], 3), 1, [3])[0].counts
