"""Collected hidden states equal those the target computes over the whole text; weights are swapped in place."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fledge.kernels.quantization import QuantizedLinear, quantize
from fledge.learning.gate import Decision
from fledge.learning.served import StagedWeights, weights_of
from fledge.learning.setup import initial_drafter_config
from fledge.learning.target import MAX_PREFIXES, linear_weight
from fledge.models.drafter import EagleDrafter
from fledge.training.targets import toy
from tests.learning.conftest import GREEDY, acceptance, finished, serve, toy_prompts


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "captured"])
def test_collected_states_equal_computed_ones(learning_engine, capture):
    engine = learning_engine(capture=capture, budget=1e-6, engine={"prefix_caching": capture is None})
    engine.drafter.fallback = None
    prompts = toy_prompts(24 if capture is None else 10, seed=11)
    shared = [3] * 32  # two pages that the prefix cache has from the second request on
    serve(engine, [shared + prompt for prompt in prompts[:5]] + prompts[5:], concurrency=5)
    hook = engine.hook
    collected = [one for one in hook.ring.kept if one.text is not None]
    assert len(collected) >= 4
    for sample in collected:
        found, expected = sample.text, hook.target.read([(sample.tokens, sample.answer_start)])[0]
        for mine, other in zip([*found.taps, found.hidden_TD], [*expected.taps, expected.hidden_TD], strict=True):
            assert len(mine) == len(other)
            # Tolerance for bf16 and another summation order. The last token's states are unused.
            torch.testing.assert_close(mine[:-1].float(), other[:-1].float(), rtol=0.02, atol=0.05)


def test_cached_prefix_is_known_after_reading_a_text_with_it(learning_engine):
    """States of a cached prefix are not computed while requests run; the next read of a text with it adds them."""
    target = learning_engine(budget=1e-6).hook.target
    tokens = [3, *range(4, 30)]
    whole = target.read([(tokens, 20)])[0]
    *taps, _ = states = [*whole.taps, torch.randn(len(tokens), target.hidden_size)]
    assert target.collected(tokens, 20, 16, [layer[16:] for layer in states], 256) is None
    assert list(target.unknown) == [tuple(tokens[:16])]
    for other in range(30, 30 + MAX_PREFIXES + 3):  # only the most recent ones are kept
        assert target.collected([other, *tokens[1:]], 20, 16, [layer[16:] for layer in states], 256) is None
    assert len(target.unknown) == MAX_PREFIXES
    assert target.collected(tokens, 20, 16, [layer[16:] for layer in states], 256) is None
    target.read([(tokens, 20)])
    assert tuple(tokens[:16]) not in target.unknown
    found, _ = target.collected(tokens, 20, 16, [layer[16:] for layer in states], 256)
    assert all(torch.equal(mine, tap) for mine, tap in zip(found.taps, taps, strict=True))


def test_captured_cycles_train_and_swap(learning_engine, drafter):
    """Runs the captured executor's functions without CUDA graphs: same functions, addresses and order."""
    engine = learning_engine(capture=False)
    hook = engine.hook
    address = hook.served.network.fc.weight.data_ptr()
    first = serve(engine, toy_prompts(6, seed=12))
    while not hook.learner.counts.steps:
        assert engine.idle()
    better = {name: value.detach() for name, value in drafter.named_parameters()}
    for prompt in toy_prompts(4, seed=13):  # requests continue through the swap
        engine.add_request(prompt, GREEDY)
    engine.step()
    list(hook.served.swap(better, Decision(True, "a test")))
    serve(engine, [])
    last = serve(engine, toy_prompts(6, seed=14), learn=False)
    assert acceptance(last) > 1.7 > 1.2 > acceptance(first)
    assert hook.served.network.fc.weight.data_ptr() == address
    engine.check_integrity()


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_swap_equals_fresh_start_with_the_same_weights(learning_engine, dtype, own_head):
    """The drafter's own head is packed in 5 bits, 6 with block scales."""
    first = EagleDrafter(replace(initial_drafter_config(toy.TARGET), own_head=own_head))
    engine = learning_engine(first, budget=1e-6, engine={"dtype": dtype})
    network, hook = engine.hook.served.network, engine.hook
    generator = torch.Generator().manual_seed(0)
    weights = {n: v + 0.1 * torch.randn(v.shape, generator=generator) for n, v in hook.served.weights.items()}
    pointers = [module.native.pointer for module in network.modules() if getattr(module, "native", None) is not None]
    staged = StagedWeights(network)
    for _ in staged.prepare(weights):
        pass
    staged.apply()
    fresh = EagleDrafter(network.config)
    fresh.load_state_dict({**weights, "d2t": network.d2t})
    other = learning_engine(fresh, budget=1e-6, engine={"dtype": dtype}).hook.served.network
    x = torch.randn(3, network.fc.in_features, generator=generator)
    assert torch.equal(network.fc(x), other.fc(x))
    y = torch.randn(3, network.layers[0].mlp.gate_up_proj.in_features, generator=generator)
    assert torch.equal(network.layers[0].mlp.gate_up_proj(y), other.layers[0].mlp.gate_up_proj(y))
    assert torch.equal(network.norm.weight, other.norm.weight)
    if own_head:
        z = torch.randn(3, network.lm_head.in_features, generator=generator)
        assert torch.equal(network.lm_head(z), other.lm_head(z))
    assert pointers == [m.native.pointer for m in network.modules() if getattr(m, "native", None) is not None]


def test_weights_in_act_order_are_read_in_the_order_of_the_inputs():
    linear = nn.Linear(128, 8, bias=False)
    order = torch.randperm(128)
    quantised = QuantizedLinear(quantize(linear.weight.detach()[:, order], 8, 64), None, order)
    x = torch.randn(3, 128)
    torch.testing.assert_close(x @ linear_weight(quantised).t(), quantised(x))


def test_weights_of_is_a_copy(learning_engine):
    hook = learning_engine(budget=1e-6).hook
    before = copy.deepcopy(hook.served.weights)
    with torch.no_grad():
        next(hook.learner.candidate.master.parameters()).zero_()
    assert all(torch.equal(value, before[name]) for name, value in hook.served.weights.items())
    assert set(weights_of(hook.learner.candidate.master)) == set(before)


def test_a_micro_step_makes_launch_ahead_skip_a_record(learning_engine, drafter):
    engine = learning_engine(drafter, capture=False, budget=1e-6)
    pace = engine.executor.launch_ahead
    serve(engine, toy_prompts(6, seed=12))
    pace.skips_next = False
    assert engine.idle()
    assert pace.skips_next


def test_training_with_a_target_not_served_in_bf16(learning_engine, drafter, monkeypatch):
    """Training steps compute in bf16, as on a GPU."""
    for module in ("target", "candidate"):
        monkeypatch.setattr(f"fledge.learning.{module}.training_dtype", lambda _: torch.bfloat16)
    engine = learning_engine(drafter, budget=1e-6, capture=False)  # serves in fp32, unpacked
    assert engine.decoder.dtype == torch.float32
    learner = engine.hook.learner
    serve(engine, toy_prompts(12, seed=12))
    batch = learner._draw()
    list(learner._read_missing(batch))
    assert finished(learner._train(batch))
    assert learner.target.head_bytes == 2 * learner.target.vocab_size * learner.target.hidden_size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_training_on_gpu_with_a_target_not_in_bf16(dtype, learning_engine):
    """The states come from captured cycles, and the drafter starts from the target's last layer."""
    engine = learning_engine(engine={"device": "cuda", "dtype": dtype}, budget=1e-6)
    serve(engine, toy_prompts(12, seed=12))
    learner = engine.hook.learner
    while not learner.counts.steps:
        assert engine.idle()
    assert engine.hook.stopped is None
    assert learner.target.head_bytes == 2 * learner.target.vocab_size * learner.target.hidden_size
