"""Evaluation: the acceptance computed from one rollout equals what the serving engine counts."""

from __future__ import annotations

import pytest
import torch

from fledge.drift.metrics import by_text
from fledge.drift.rollout import roll_out
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.sampling import SamplingParams
from fledge.training.data.templates import NO_TEMPLATE, SYSTEM_PROMPTS, TEXT_TEMPLATES
from fledge.training.evaluate import HeldOut, Judged, conditions, describe_lengths, evaluate
from fledge.training.targets.continuations import continuations
from fledge.training.targets.target import DecoderTarget
from tests.drift.test_probes import decoder_with_sink
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config
from tests.training.chat import INSTRUCT, chat_tokenizer

PROMPTS = [[5, 9, 77, 3], [1, 2, 3, 4, 5, 6, 7], [100, 50, 20], [64, 8], [11, 12, 13, 14, 15]]
NEW_TOKENS = 24


def good_drafter(decoder, **flags):
    """A drafter that sometimes agrees with the target, because it has the target's head."""
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, **flags))
    drafter.fc.weight.copy_(torch.eye(32).repeat(1, 3) / 3)
    drafter.lm_head.weight.copy_(decoder.lm_head.weight[drafter.target_ids(torch.arange(drafter.config.draft_vocab_size))])
    return drafter.share(decoder.embed_tokens, decoder.lm_head)


def held_out_of(drafter, decoder, texts, starts) -> HeldOut:
    target = DecoderTarget(decoder, drafter.config.aux_layer_ids)
    return HeldOut.of(target, texts, starts, target.device)


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_output": True, "window": 12, "draft_vocab_size": 100}], ids=str
)
def test_equals_what_the_engine_counts(flags):
    decoder = tiny_decoder(max_positions=2048)
    drafter = good_drafter(decoder, **flags)
    answers = continuations(decoder, PROMPTS, NEW_TOKENS, stop_ids=[])
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    held_out = held_out_of(drafter, decoder, texts, [len(prompt) for prompt in PROMPTS])
    figures = evaluate(drafter, held_out, (2, 4))
    by_prompt = by_text(roll_out(drafter, held_out.texts, 4), len(texts), (2, 4))
    for depth in (2, 4):
        engine = build_engine(decoder, Speculation(drafter, depth).fixed_depth(), EngineConfig(dtype="float32"))
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
        while engine.has_unfinished():
            engine.step()
        for request, answer, text in zip(requests, answers, by_prompt, strict=True):
            assert request.answer == answer
            assert (request.stats.accepted, request.stats.steps) == text.counts[depth]
        assert figures["acceptance_length"][depth] == pytest.approx(engine.stats.acceptance_length)
    assert len(figures["accuracy"]) == len(figures["rms"]) == 4


def test_continuations_stop_at_the_stop_token():
    decoder = tiny_decoder()
    free = continuations(decoder, PROMPTS[:2], 10, stop_ids=[])
    stop = free[0][4]
    stopped = continuations(decoder, PROMPTS[:2], 10, stop_ids=[stop])
    assert stopped[0] == free[0][: free[0].index(stop) + 1]


def test_sink_column_defaults_to_the_targets():
    decoder = decoder_with_sink(pivot=77)
    drafter = good_drafter(decoder)
    drafter.layers[0].self_attn.qkv_proj.weight.normal_()
    texts = [[5, 9, 77, *range(10, 40)], [7, 8, 77, *range(40, 75)]]
    held_out = held_out_of(drafter, decoder, texts, [4, 4]).with_sink(decoder)
    shares = {column: evaluate(drafter, held_out, (2,), column)["sink_share"] for column in (None, 0, 2)}
    assert shares[None] == shares[2]
    assert shares[None] != shares[0]


def evaluated(texts: list[list[int]], starts: list[int]) -> dict:
    decoder = tiny_decoder()
    drafter = good_drafter(decoder)
    target = DecoderTarget(decoder, drafter.config.aux_layer_ids)
    return evaluate(drafter, HeldOut.of(target, texts, starts, torch.device("cpu")), [3, 5])


@pytest.mark.parametrize("texts", [[[1, 2, 3, 4, 5]], [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4, 9], [5, 6, 7, 8, 9]]])
def test_a_single_text_and_answers_of_one_token_have_figures(texts):
    """One text has no standard error, one-token answers have no drafts: the model card failed after hours of training."""
    figures = evaluated(texts, [3] * len(texts))
    assert figures["acceptance_length"][3] >= 1
    assert (figures["standard_error"][3] is None) == (len(texts) == 1)
    assert "at depth 5" in describe_lengths(figures)


def test_answers_that_loop_do_not_count():
    loop = [7, 8, 9, 10] * 40
    (free,) = continuations(tiny_decoder(), [[4, 5, 6]], 12, stop_ids=[])  # partly accepted; the loop is not
    both = evaluated([[1, 2, 3, *loop], [4, 5, 6, *free]], [3, 3])
    alone = evaluated([[4, 5, 6, *free]], [3])
    judged = Judged.of(both)
    assert judged.length == alone["acceptance_length"]
    assert both["acceptance_length"] != alone["acceptance_length"]
    assert judged.num_looping == 1
    assert f"1 of 2 answers loop and are left out; with them {both['acceptance_length'][3]:.2f}" in describe_lengths(both)
    all_loop = evaluated([[1, 2, 3, *loop]], [3])
    assert Judged.of(all_loop).length == all_loop["acceptance_length"]


@pytest.mark.parametrize("template", [None, INSTRUCT])
def test_robustness_is_measured_under_conditions_that_training_does_not_have(template):
    tokenizer = chat_tokenizer() if template is None else chat_tokenizer(template)
    question = "How are you?"
    found = conditions(tokenizer, [question], texts=True)
    assert next(iter(found)) == "as served"
    assert len(found) == 4
    prompts = {name: tokenizer.decode(prompt, skip_special_tokens=False) for name, (prompt,) in found.items()}
    for name, prompt in list(prompts.items())[1:]:
        assert prompt != prompts["as served"]
        assert question in prompt
        assert not any(text in prompt for text in SYSTEM_PROMPTS if len(text) > 1), name
        rendered = [one.user.replace("{}", question) + one.opening for one in (*TEXT_TEMPLATES.values(), NO_TEMPLATE)]
        assert not any(prompt.endswith(one) for one in rendered if "system prompt" not in name), name
    assert set(conditions(tokenizer, [question], texts=False)) == {"as served"}
