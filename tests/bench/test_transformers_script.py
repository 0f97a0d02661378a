"""transformers as a baseline: what is timed, and how deep its assistant drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.bench import transformers_script
from fledge.bench.transformers_script import FirstTokens, generate, measure, with_depth
from tests.serving.model_folder import make_model


class SlowModel:
    """Five seconds for the prompt, then a second for each group of tokens, by a clock of its own."""

    device = "cpu"

    def __init__(self, *groups: list[int]) -> None:
        self.groups, self.now = groups, 100.0

    def generate(self, tokens, streamer, **_):
        streamer.put(tokens)
        self.now += 4
        for group in self.groups:
            self.now += 1
            streamer.put(torch.tensor(group))
        streamer.end()
        return torch.tensor([tokens[0].tolist() + [token for group in self.groups for token in group]])


@pytest.mark.parametrize(
    ("groups", "per_user"),
    [
        ([[7], [8], [9]], 2 / 2),
        ([[7, 8, 9], [10, 11]], 2 / 1),  # what comes with the first token counts neither as tokens nor as time
        ([[7]], 0.0),
    ],
)
def test_a_users_speed_leaves_out_the_prompt_and_the_first_tokens(monkeypatch, groups, per_user):
    model = SlowModel(*groups)
    monkeypatch.setattr(transformers_script, "time", SimpleNamespace(perf_counter=lambda: model.now))
    found = measure(model, [[1, 2], [3]], 16, {})
    answer = [token for group in groups for token in group]
    assert found["answers"] == [answer, answer]
    assert found["first_token_seconds"] == 5
    assert found["seconds"] == 2 * (4 + len(groups))
    assert found["tokens_per_second"] == len(answer) / (4 + len(groups))
    assert found["tokens_per_second_per_user"] == per_user


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(make_model(tmp_path_factory.mktemp("transformers"))).eval()


@pytest.mark.parametrize("depth", [2, 4])
def test_an_assistant_drafts_as_deep_as_it_is_told(model, depth):
    """A model that assists itself has all of its drafts accepted, and the target adds one token."""
    first, plain = FirstTokens(), FirstTokens()
    answer = generate(model, [1, 5, 6, 7], 12, {"assistant_model": with_depth(model, depth)}, first)
    assert answer == generate(model, [1, 5, 6, 7], 12, {}, plain)
    assert (first.count, plain.count) == (depth + 1, 1)
    assert model.generation_config.num_assistant_tokens_schedule != "constant"
