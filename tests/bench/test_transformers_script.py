"""transformers as a baseline: what is timed, and the depth of its assistant."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.bench import transformers_script
from fledge.bench.transformers_script import FirstTokens, generate, measure, with_depth
from tests.serving.model_folder import make_model


class SlowModel:
    """A model with a simulated clock: the first group of tokens comes after 5 s, every further group takes 1 s."""

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
        ([[7, 8, 9], [10, 11]], 2 / 1),  # tokens that come with the first one are not counted, nor is their time
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
def test_assistant_uses_the_given_depth(model, depth):
    """A model that is its own assistant has all drafts accepted, and the target adds one token."""
    first, plain = FirstTokens(), FirstTokens()
    answer = generate(model, [1, 5, 6, 7], 12, {"assistant_model": with_depth(model, depth)}, first)
    assert answer == generate(model, [1, 5, 6, 7], 12, {}, plain)
    assert (first.count, plain.count) == (depth + 1, 1)
    assert model.generation_config.num_assistant_tokens_schedule != "constant"
