"""Sampled speculative output has the target's distribution: a chi-square test that a wrong rule fails.

The target is a fixed table: the distribution of the next token depends on the token before. Pairs of tokens that come out of
the engine's own verification are counted against their exact joint probability under the request's settings.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare

from fledge.sampling import SamplingParams
from fledge.speculation.distribution import adjust, probabilities
from fledge.speculation.verification import Draft, Verdict, verify_sampled

VOCABULARY, RUNS = 8, 6000
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


def target_row(table: torch.Tensor, params: SamplingParams, answer: list[int]) -> torch.Tensor:
    return probabilities(adjust(table[answer[-1] if answer else 0], params, [0], answer), params)


def chain(drafter: torch.Tensor, params: SamplingParams, answer: list[int], generator: torch.Generator) -> Draft:
    """Two tokens drawn from the drafter's own q."""
    draft, last = Draft(probs=[]), answer[-1] if answer else 0
    for depth in range(2):
        q = probabilities(drafter[last], params)
        last = int(torch.multinomial(q, 1, generator=generator))
        draft.tokens.append(last)
        draft.parents.append(depth - 1)
        draft.probs.append(q)
    return draft


def tree(drafter: torch.Tensor, params: SamplingParams, answer: list[int], generator: torch.Generator) -> Draft:
    """The two likeliest tokens, and two below each."""
    draft = Draft()
    first = drafter[answer[-1] if answer else 0].topk(2).indices.tolist()
    draft.tokens, draft.parents = list(first), [-1, -1]
    for parent, token in enumerate(first):
        below = drafter[token].topk(2).indices.tolist()
        draft.tokens += below
        draft.parents += [parent, parent]
    return draft


def three_tokens(make_draft: Callable, verify: Callable, params: SamplingParams, seed: int) -> tuple[list, int]:
    table, drafter = tables(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    counts: dict[tuple[int, ...], int] = {}
    accepted = 0
    for _ in range(RUNS):
        answer: list[int] = []
        while len(answer) < 3:
            draft = make_draft(drafter, params, answer, generator)
            verdict = verify(lambda _, path, so_far=answer: target_row(table, params, so_far + path), draft, generator)
            answer = [*answer, *(draft.tokens[node] for node in verdict.accepted), verdict.next_token]
            accepted += len(verdict.accepted)
        counts[tuple(answer[:3])] = counts.get(tuple(answer[:3]), 0) + 1
    outcomes = []
    for a in range(VOCABULARY):
        for b in range(VOCABULARY):
            for c in range(VOCABULARY):
                p = target_row(table, params, [])[a] * target_row(table, params, [a])[b] * target_row(table, params, [a, b])[c]
                outcomes.append((float(p), counts.get((a, b, c), 0)))
    return outcomes, accepted


def p_value(outcomes: list[tuple[float, int]]) -> float:
    """Outcomes expected fewer than ten times are pooled; impossible ones must not occur at all."""
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
    outcomes, accepted = three_tokens(make_draft, verify_sampled, SETTINGS[setting], seed=22)
    assert accepted > RUNS / 2, "the drafter must matter for the test to mean anything"
    assert p_value(outcomes) > 1e-3


def accept_by_agreement(row, draft: Draft, generator: torch.Generator) -> Verdict:
    """A wrong rule: a drafted token stands when it is at all likely; the replacement is drawn from p itself."""
    accepted, path, node = [], [], -1
    while True:
        p = row(node + 1, path)
        chosen = next((child for child in draft.children(node) if p[draft.tokens[child]] > 0.2), -1)
        if chosen < 0:
            return Verdict(accepted, int(torch.multinomial(p, 1, generator=generator)))
        accepted.append(chosen)
        path.append(draft.tokens[chosen])
        node = chosen


def no_residual(row, draft: Draft, generator: torch.Generator) -> Verdict:
    """A subtler wrong rule: accepts rightly, but draws the replacement from p instead of max(p - q, 0)."""
    accepted, path, node = [], [], -1
    while True:
        p = row(node + 1, path)
        chosen = -1
        for child in draft.children(node):
            q = 1.0 if draft.probs is None else float(draft.probs[child][draft.tokens[child]])
            if float(torch.rand((), generator=generator)) < float(p[draft.tokens[child]]) / q:
                chosen = child
                break
        if chosen < 0:
            return Verdict(accepted, int(torch.multinomial(p, 1, generator=generator)))
        accepted.append(chosen)
        path.append(draft.tokens[chosen])
        node = chosen


@pytest.mark.parametrize("wrong", [accept_by_agreement, no_residual])
@pytest.mark.parametrize("make_draft", [chain, tree])
def test_the_test_catches_a_wrong_rule(make_draft, wrong):
    outcomes, _ = three_tokens(make_draft, wrong, SETTINGS["temperature"], seed=22)
    assert p_value(outcomes) < 1e-6
