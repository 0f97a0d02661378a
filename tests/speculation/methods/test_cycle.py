"""Every captured method in the same cycle says what plain decoding says, greedy and sampled."""

from __future__ import annotations

import sys

import pytest
import torch

from fledge.kernels.accept import DRAFTED
from fledge.kernels.sample import sample_reference
from fledge.models.decoder import causal_attend
from fledge.speculation.depth import TreeShape
from tests.kernels.support import INTERPRETED
from tests.speculation.methods.cycle import Cycle, EagleChain, EagleTree, Ngram
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 0, 2, 6, 3, 5, 4, 4, 1], [6, 6]]
LIMIT, DEPTH, SHORT = 40, 3, 4


def method_maker(name: str, decoder, norm_output: bool):
    config = tiny_drafter_config(decoder.config, norm_output=norm_output, aux_layer_ids=(0, 1, 3))
    return {
        "chain": lambda state, pages: EagleChain(DEPTH, tiny_drafter(config), decoder, state, pages),
        "tree": lambda state, pages: EagleTree(TreeShape(4, 14), DEPTH, tiny_drafter(config), decoder, state, pages),
        "ngram": lambda state, pages: Ngram(DEPTH, state, LIMIT + max(map(len, PROMPTS))),
    }[name]


@pytest.mark.parametrize(
    ("name", "norm_output"), [("chain", False), ("chain", True), ("tree", False), ("tree", True), ("ngram", False)]
)
@pytest.mark.parametrize("temperature", [0.0, 2.0], ids=["greedy", "sampled"])
def test_says_what_plain_decoding_says(name, norm_output, temperature):
    check(name, norm_output, temperature)


@pytest.mark.gpu
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["tree", "ngram"])
def test_says_it_through_the_kernels(name, monkeypatch):
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("fledge.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda x: True)
    check(name, norm_output=True, temperature=2.0, prompts=PROMPTS[:2], limit=6)


def check(name: str, norm_output: bool, temperature: float, prompts: list[list[int]] = PROMPTS, limit: int = LIMIT) -> None:
    """Eight tokens to choose from, so that a random drafter is right now and then, in all branches of a tree."""
    decoder = tiny_decoder(5, vocab_size=8, num_layers=3)
    with torch.inference_mode():
        cycle = Cycle(decoder, method_maker(name, decoder, norm_output), DEPTH, prompts, limit, temperature)
        cycle.state.limit[1] = SHORT  # one ends before the others, and its row stays empty
        num_steps = 0
        while bool(cycle.state.active.any()):
            cycle.step()
            num_steps += 1
    answers, lengths = cycle.state.answers.tolist(), cycle.state.status.tolist()
    assert any(token >= DRAFTED for answer in answers for token in answer)
    if name == "tree":
        assert (torch.cat([path.rows_BT for path in cycle.paths])[:, 1] > 1).any(), "paths that are no chains already"
    for row, (prompt, answer, length) in enumerate(zip(prompts, answers, lengths, strict=True)):
        assert length == (SHORT if row == 1 else limit)
        answer = [token % DRAFTED for token in answer[:length]]
        tokens = torch.tensor(prompt + answer[:-1])
        hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
        logits = decoder.logits(hidden[len(prompt) - 1 :])
        plain = sample_reference(logits, torch.full((length,), temperature), torch.full((length,), row), torch.arange(length))
        assert plain.tolist() == answer
