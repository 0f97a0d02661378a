"""The captured cycle with a quantised target, run eagerly: its answers equal those of the quantised model itself."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.quantization import QuantizedLinear, quantize_linears
from fledge.models.decoder import causal_attend
from tests.engine.test_device_batch import prompts, settings
from tests.oracle import captured_answers
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_plain_and_speculative_answers_equal_the_models(quantization):
    decoder = tiny_decoder(12)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True, own_head=False))
    quantize_linears(decoder, quantization)
    assert isinstance(decoder.lm_head, QuantizedLinear)
    texts = prompts(6, seed=8)
    plain = sorted(captured_answers(decoder, settings(decoder, 4), capture=False).generate(texts, max_tokens=12, stop_ids=()))
    for text, answer in zip(texts, plain, strict=True):
        tokens = torch.tensor(text + answer.tokens[:-1])
        hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
        assert decoder.logits(hidden[len(text) - 1 :]).argmax(-1).tolist() == answer.tokens
    speculative = captured_answers(decoder, settings(decoder, 4), drafter=drafter, depth=3, capture=False)
    assert sorted(speculative.generate(texts, max_tokens=12, stop_ids=())) == plain
