"""Sampled speculative output has the target's distribution: a chi-square test, which wrong acceptance rules fail.

The target is a fixed table: the next token's distribution depends on the previous token. The engine's verification emits
triples of tokens, one seed each; their counts are compared with the exact joint probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare

from fledge.sampling import SamplingParams
from fledge.speculation.distribution import adjust, draw
from fledge.speculation.verification import Draft, LazyChoices, verify
from tests.oracle import probabilities

VOCABULARY, RUNS = 8, 4000
SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "penalties": SamplingParams(temperature=0.9, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3),
    "top-k and min-p": SamplingParams(temperature=1.2, top_k=5, min_p=0.05),
}


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target and of a drafter that resembles it."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    return target, target + torch.randn(VOCABULARY, VOCABULARY, generator=generator)


def logits_after(table: torch.Tensor, params: SamplingParams, answer: list[int]) -> torch.Tensor:
    return adjust(table[answer[-1] if answer else 0], params, [0], answer)


def chain(drafter: torch.Tensor, params: SamplingParams, answer: list[int], seed: int) -> Draft:
    """A draft of two tokens, sampled with the target's noise."""
    draft, last = Draft(), answer[-1] if answer else 0
    for depth in range(2):
        last = draw(drafter[last], params, seed, len(answer) + depth)
        draft.tokens.append(last)
        draft.parents.append(depth - 1)
    return draft


def tree(drafter: torch.Tensor, params: SamplingParams, answer: list[int], seed: int) -> Draft:
    """A draft of the two most likely tokens and two children of each."""
    draft = Draft()
    first = drafter[answer[-1] if answer else 0].topk(2).indices.tolist()
    draft.tokens, draft.parents = list(first), [-1, -1]
    for parent, token in enumerate(first):
        draft.tokens += drafter[token].topk(2).indices.tolist()
        draft.parents += [parent, parent]
    return draft


def by_position(logits: torch.Tensor, params: SamplingParams, seed: int, answer: list[int], draft: Draft, row: int) -> int:
    return draw(logits, params, seed, len(answer))


def three_tokens(make_draft: Callable, choose: Callable, params: SamplingParams, seed: int) -> tuple[list, int]:
    table, drafter = tables(seed)
    counts: dict[tuple[int, ...], int] = {}
    accepted = 0
    for run in range(RUNS):
        answer: list[int] = []
        while len(answer) < 3:
            draft = make_draft(drafter, params, answer, run)

            def chosen(row: int, path: list[int], so_far=answer, draft=draft, run=run) -> int:
                text = so_far + path
                return choose(logits_after(table, params, text), params, run, text, draft, row)

            verified = verify(LazyChoices(chosen, draft), draft)
            answer = [*answer, *(draft.tokens[node] for node in verified.accepted), verified.next_token]
            accepted += len(verified.accepted)
        counts[tuple(answer[:3])] = counts.get(tuple(answer[:3]), 0) + 1

    def row(answer: list[int]) -> torch.Tensor:
        return probabilities(logits_after(table, params, answer), params)

    outcomes = []
    for a in range(VOCABULARY):
        for b in range(VOCABULARY):
            for c in range(VOCABULARY):
                outcomes.append((float(row([])[a] * row([a])[b] * row([a, b])[c]), counts.get((a, b, c), 0)))
    return outcomes, accepted


def p_value(outcomes: list[tuple[float, int]]) -> float:
    """The chi-square p-value. Outcomes expected fewer than ten times are pooled; an impossible one that occurs gives 0."""
    if any(count and p < 1e-12 for p, count in outcomes):
        return 0.0
    common = [(p, count) for p, count in outcomes if p * RUNS >= 10]
    rest = (1 - sum(p for p, _ in common), RUNS - sum(count for _, count in common))
    cells = [*common, rest] if rest[0] * RUNS >= 10 else common
    expected = torch.tensor([p for p, _ in cells], dtype=torch.float64)
    observed = torch.tensor([count for _, count in cells], dtype=torch.float64)
    expected = expected / expected.sum() * observed.sum()
    return float(chisquare(observed.numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("make_draft", [chain, tree])
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_output_has_the_targets_distribution(make_draft, setting):
    outcomes, accepted = three_tokens(make_draft, by_position, SETTINGS[setting], seed=22)
    assert accepted > RUNS / 2, "too few drafts are accepted for a meaningful test"
    assert p_value(outcomes) > 1e-3


def one_noise(logits: torch.Tensor, params: SamplingParams, seed: int, answer: list[int], draft: Draft, row: int) -> int:
    """A wrong rule: every position is sampled with the same noise."""
    return draw(logits, params, seed, 0)


def likely_drafts(logits: torch.Tensor, params: SamplingParams, seed: int, answer: list[int], draft: Draft, row: int) -> int:
    """A wrong rule: a drafted token is accepted if its probability exceeds 0.2."""
    p = probabilities(logits, params)
    likely = [child for child in draft.children(row - 1) if p[draft.tokens[child]] > 0.2]
    return draft.tokens[likely[0]] if likely else draw(logits, params, seed, len(answer))


@pytest.mark.parametrize("wrong", [one_noise, likely_drafts])
def test_a_wrong_rule_fails_the_chi_square_test(wrong):
    outcomes, _ = three_tokens(chain, wrong, SETTINGS["temperature"], seed=22)
    assert p_value(outcomes) < 1e-6
