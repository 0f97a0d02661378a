"""On a GPU: captured cycles equal eager cycles and the CPU's, do not synchronise, and launch few kernels."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.executors import device_batch
from fledge.engine.executors.batch_state import GREEDY, SAMPLED, TRUNCATED
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.engine.executors.prefill import RECORDED_AT
from fledge.kernels.attention import launch_config, rope_attention
from fledge.kernels.triton_support import is_hopper_or_newer
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from tests.engine.test_device_batch import VERSIONS, answer_of, entries, prompts
from tests.oracle import captured_answers, engine_with, make_batch
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
STOPS = (5, 17, 40, 99)


def settings(decoder, rows: int) -> EngineConfig:
    return EngineConfig(
        device="cuda", dtype="float32", max_model_len=128, max_num_seqs=rows, kv_cache_tokens=rows * 256, page_size=64
    ).resolve(decoder.config)


def networks(version: str = "3.1", **target):
    decoder = tiny_decoder(12, **target).cuda()
    return decoder, tiny_drafter(tiny_drafter_config(decoder.config, **VERSIONS[version])).cuda()


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("version", VERSIONS)
def test_captured_equals_eager_and_the_cpu(version):
    """Drafts and answers, with row counts on both sides of the small kernels' limit."""
    decoder, drafter = networks(version)
    config = tiny_drafter_config(decoder.config, **VERSIONS[version])
    texts, depth = prompts(24, seed=1), 4
    cpu_config = EngineConfig(device="cpu", dtype="float32", max_model_len=128, max_num_seqs=32, kv_cache_tokens=8192)
    results = []
    for where in ("cpu", "eager", "captured"):
        if where == "cpu":
            cpu_decoder = tiny_decoder(12)
            batch = make_batch(cpu_decoder, cpu_config.resolve(cpu_decoder.config), drafter=tiny_drafter(config), capture=False)
        else:
            batch = make_batch(decoder, settings(decoder, 32), drafter=drafter, capture=where == "captured")
        batch.prefill(entries(batch, texts))
        found = []
        for _ in range(5):
            batch.graphs.run(32, depth, GREEDY)
            found.append(batch.state.drafts[:24, :depth].tolist())
        found.append([answer_of(batch, row)[:5] for row in range(24)])
        results.append(found)
    assert results[1] == results[2]
    assert results[0] == results[1]


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED, TRUNCATED])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_cycle_does_not_synchronise(mode, depth):
    decoder, drafter = networks()
    batch = make_batch(decoder, settings(decoder, 8), drafter=drafter, capture=True)
    options = [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}][mode]
    batch.prefill(entries(batch, prompts(8), **options))
    batch.graphs.record([(8, depth, mode)])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            batch.step(8, depth, mode)  # eagerly: a captured cycle cannot synchronise anyway
            batch.graphs.run(8, depth, mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_prefill_of_a_new_size_does_not_synchronise():
    """The size is not recorded yet and is large enough for cuBLAS, whose bits at this size have not been checked either."""
    decoder, _ = networks()
    batch = make_batch(decoder, settings(decoder, 8), capture=True)
    batch.prefill(entries(batch, [[1] * 20] * 8, limit=20))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.prefill(entries(batch, [[1] * 100] * 8, limit=20))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not batch.prefills.graphs.graphs


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}])
def test_speculative_answers_equal_plain_answers(options):
    decoder, drafter = networks()
    texts = prompts(60, seed=8)
    plain = captured_answers(decoder, settings(decoder, 32), capture=True)
    wanted = sorted(plain.generate(texts, max_tokens=20, stop_ids=STOPS, **options))
    for depth in (1, 5):
        speculative = captured_answers(decoder, settings(decoder, 32), drafter=drafter, depth=depth, capture=True)
        assert sorted(speculative.generate(texts, max_tokens=20, stop_ids=STOPS, **options)) == wanted


def test_serving_equals_the_eager_engine_on_the_cpu():
    texts = prompts(30, seed=3)
    params = SamplingParams(max_tokens=20, temperature=0)
    eager = engine_with(tiny_decoder(12), Speculation("none"))
    config = EngineConfig(device="cuda", dtype="float32", max_model_len=128, max_num_seqs=8, kv_cache_tokens=4096)
    decoder, drafter = networks()
    engine = build_engine(decoder, Speculation(drafter, 3), config)
    assert isinstance(engine.executor, CudaGraphExecutor)
    answers = []
    for one in (eager, engine):
        requests = [one.add_request(text, params) for text in texts]
        while one.has_unfinished():
            one.step()
        answers.append([request.answer for request in requests])
    assert answers[0] == answers[1]


def kernel_files() -> dict[str, str]:
    """Maps each of the package's kernels, by its name in the profiler, to its file, or to `linear` for all linear kernels."""
    from triton.runtime.jit import JITFunction

    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("fledge.kernels."):
            kernels = [value.fn for value in vars(module).values() if isinstance(value, JITFunction)]
            file = "linear" if name.startswith("fledge.kernels.linear.") else name.rpartition(".")[2]
            found |= {kernel.__name__: file for kernel in kernels if kernel.__module__ == name}
    return found


@pytest.mark.parametrize("depth", [0, 3])
def test_launches_of_a_cycle(depth):
    """The kernels of a cycle with one greedy row in bf16, and their number. No PyTorch kernel runs.

    The vocabulary has at least 3,840 tokens, as in real models: the head is one kernel that also finds the best token. The norm
    before it is a separate kernel; the norms before a layer's linears are fused into them.
    """
    if not is_hopper_or_newer(torch.device("cuda", 0)):
        pytest.skip("before Hopper, norms are separate kernels")
    decoder, drafter = (network.to(torch.bfloat16) for network in networks(vocab_size=4096))
    config = replace(settings(decoder, 1), dtype="bfloat16")
    batch = make_batch(decoder, config, drafter=drafter, capture=True)
    batch.prefill(entries(batch, prompts(1)))
    batch.graphs.run(1, depth, GREEDY)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        batch.graphs.run(1, depth, GREEDY)
        torch.cuda.synchronize()
    files, launches = kernel_files(), Counter()
    for event in recorded.key_averages():
        if event.self_device_time_total:
            launches[files.get(event.key, event.key)] += event.count
    layers = len(decoder.layers)
    head, layer = Counter(rms_norm=1, linear=1), Counter(linear=4, rope_attention=1)
    expected = Counter(verify_inputs=1, accept=1) + times(layers, layer) + head
    if depth:
        expected += times(depth, head) + times(depth - 1, Counter(draft_inputs=1) + layer)
        expected += Counter(draft_inputs=3, linear=1) + layer  # sync: concatenate taps, `fc`, inputs, and keep the last state
    assert launches == expected


def times(count: int, launches: Counter[str]) -> Counter[str]:
    return Counter({name: count * number for name, number in launches.items()})


def test_captured_prefill_equals_eager_prefill():
    """In bf16, where prefill is captured; later prompts replay the graph of earlier ones."""
    decoder, drafter = (network.to(torch.bfloat16) for network in networks())
    config = EngineConfig(
        device="cuda", dtype="bfloat16", max_model_len=128, max_num_seqs=8, kv_cache_tokens=2048, page_size=64
    ).resolve(decoder.config)
    found = []
    for capture in (True, False):
        batch = make_batch(decoder, config, drafter=drafter, capture=capture)
        for seed in (1, 2, 3):
            batch.prefill(entries(batch, prompts(5, seed=seed)))
        assert bool(batch.prefills.graphs.graphs) == capture
        found.append((batch.method.states_RD[:5].float(), batch.state.rows.token[:5].tolist(), batch.cache.keys[:, :, :16]))
    scale = found[1][0].abs().max().item()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0.05 * scale)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0.05, atol=0.05)
    assert sum(a == b for a, b in zip(found[0][1], found[1][1], strict=True)) >= 4  # a tie may be decided differently


def test_no_graph_is_captured_after_warm_up():
    decoder, drafter = (network.to(torch.bfloat16) for network in networks())
    config = EngineConfig(device="cuda", dtype="bfloat16", max_model_len=128, max_num_seqs=4, kv_cache_tokens=2048)
    engine = build_engine(decoder, Speculation(drafter, 3), config)
    assert len(engine.warm_up()) == 1
    batch = engine.executor.batch
    before = len(batch.graphs.graphs), len(batch.prefills.graphs.graphs)
    for text in prompts(6, seed=4):
        engine.add_request(text, SamplingParams(max_tokens=12, temperature=0))
        engine.add_request(text, SamplingParams(max_tokens=12, temperature=0.8, seed=1))
    while engine.has_unfinished():
        engine.step()
    assert (len(batch.graphs.graphs), len(batch.prefills.graphs.graphs)) == before


def test_prefix_reuse_does_not_change_answers():
    decoder, drafter = networks()
    answers = []
    for caching in (True, False):
        config = replace(settings(decoder, 8), max_model_len=512, kv_cache_tokens=8192, prefix_caching=caching)
        engine = build_engine(decoder, Speculation(drafter, 3), config)
        base = [number * 7 % 128 for number in range(200)]
        texts = [base, *([*base[: 130 + 20 * index], *prompts(1, seed=index)[0]] for index in range(4))]
        for text in texts:
            request = engine.add_request(text, SamplingParams(max_tokens=20, temperature=0))
            while engine.has_unfinished():
                engine.step()
                engine.check_integrity()
            answers.append(request.answer)
            assert request.num_cached == (None if not caching else 0 if text is base else 128)
    assert answers[:5] == answers[5:]


def test_captured_prefill_with_cached_prefixes_equals_eager_prefill():
    decoder, drafter = (network.to(torch.bfloat16) for network in networks())
    config = EngineConfig(
        device="cuda", dtype="bfloat16", max_model_len=512, max_num_seqs=8, kv_cache_tokens=8192, page_size=64
    ).resolve(decoder.config)
    found = []
    for capture in (True, False):
        batch = make_batch(decoder, config, drafter=drafter, capture=capture)
        made = entries(batch, [[(number * 7 + seed) % 128 for number in range(100 + 40 * seed)] for seed in range(5)])
        batch.prefill(made)
        for entry in made:
            entry.num_cached = 64
        for _ in range(RECORDED_AT):
            batch.prefill(made)
        assert ((768, 64, GREEDY) in batch.prefills.graphs.graphs) == capture
        found.append((batch.method.states_RD[:5].float(), batch.state.rows.token[:5]))
    same = found[0][1] == found[1][1]
    assert (
        same.sum() >= 4
    )  # two logits differ by a rounding: that tie may be decided differently, and the drafter's state depends on the token
    scale = found[1][0].abs().max().item()
    torch.testing.assert_close(found[0][0][same], found[1][0][same], rtol=0, atol=0.05 * scale)


def test_cycles_of_a_small_kv_bucket_give_the_same_answers(monkeypatch):
    configs, choose_config = [], launch_config.choose_config
    monkeypatch.setattr(device_batch, "FEW_KEYS", 64)
    monkeypatch.setattr(launch_config, "FEW_KEYS", 64)
    monkeypatch.setattr(rope_attention, "choose_config", lambda *what: (configs.append(choose_config(*what)), configs[-1])[1])
    decoder, drafter = networks()
    found = []
    for num_keys in (64, 65):
        configs.clear()
        batch = make_batch(decoder, settings(decoder, 4), drafter=drafter, capture=True)
        batch.prefill(entries(batch, prompts(4, seed=2)))
        kv_bucket = batch.kv_bucket(num_keys)
        assert kv_bucket == ((64,) if num_keys == 64 else ())
        for _ in range(4):
            batch.graphs.run(4, 3, GREEDY, *kv_bucket)
        found.append(([answer_of(batch, row)[:5] for row in range(4)], batch.state.drafts[:4, :3].tolist()))
        assert set(configs) == {launch_config.FEW if kv_bucket else launch_config.SOME}
    assert found[0] == found[1]


def test_captured_chunked_prefill_equals_eager_chunks(monkeypatch):
    """The second chunk of the first prompt is captured; the second prompt replays the graphs."""
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 32)
    decoder, drafter = networks()
    found = []
    for capture in (True, False):
        batch = make_batch(decoder, settings(decoder, 2), drafter=drafter, capture=capture)
        texts = [(one * 100)[:length] for one, length in zip(prompts(3, seed=4), (100, 65, 90), strict=True)]
        for entry in entries(batch, texts[:2]) + entries(batch, texts[2:]):
            read = 0
            while read < len(entry.text):
                read = batch.prefill_chunk(entry, read)
        assert bool(batch.chunks.graphs.graphs) == capture
        for _ in range(4):
            batch.graphs.run(2, 3, GREEDY)
        found.append(([answer_of(batch, row)[:5] for row in range(2)], batch.state.drafts[:2, :3].tolist()))
    assert found[0] == found[1]


OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "truncated": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 4},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": list(range(0, 128, 3))},
    "logprobs": {"logprobs": 5},
    "bad words": {"bad_word_ids": [[5, 9], [11]]},
    "many stop ids": {"stop_token_ids": list(range(40, 128))},
}


class EvenTokens:
    """A simple grammar: every token id is even."""

    def __call__(self, tokens, logits):
        logits[1::2] = -torch.inf
        return logits

    def fill(self, tokens, mask_W):
        mask_W &= 0x55555555


@pytest.mark.parametrize("method", ["plain", "chain", "tree", "ngram"])
def test_every_option_gives_the_eager_executors_answer(method):
    """In fp32 on the GPU, against the eager executor on the CPU: all options in one batch, and each alone."""
    texts = prompts(len(OPTIONS) + 1, seed=5)
    kinds = [*OPTIONS.values(), {"logits_processors": [EvenTokens()]}]
    params = [SamplingParams(**({"max_tokens": 16, "temperature": 0} | kind)) for kind in kinds]
    answers = []
    for device in ("cpu", "cuda"):
        decoder, drafter = (network.to(device) for network in networks())
        tree = TreeShape(3, 8) if method == "tree" else None
        speculation = Speculation({"plain": "none", "ngram": "ngram"}.get(method, drafter), 3, tree).fixed_depth()
        config = EngineConfig(device=device, dtype="float32", max_model_len=128, max_num_seqs=16, kv_cache_tokens=8192)
        engine = build_engine(decoder, speculation, config)
        for groups in ([texts], [[text] for text in texts]):
            requests = []
            for group in groups:
                requests += [engine.add_request(text, params[texts.index(text)]) for text in group]
                while engine.has_unfinished():
                    engine.step()
                    engine.check_integrity()
            answers.append([(request.answer, request.finish_reason, request.stop_reason) for request in requests])
            found = requests[list(OPTIONS).index("logprobs")].logprobs
            assert len(found) == 16
            assert all(len(one.top) == 5 and one.logprob <= one.top[0][1] + 1e-5 for one in found)
            assert all(token % 2 == 0 for token in requests[-1].answer)
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_a_drafter_with_latent_attention_is_captured():
    """The drafter has random weights; answers equal those without a drafter."""
    decoder, _ = networks()
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, **VERSIONS["latent attention"])).cuda()
    texts, wanted = prompts(8, seed=6), None
    for speculation in (Speculation("none"), Speculation(drafter, 3).fixed_depth()):
        config = EngineConfig(device="cuda", dtype="float32", max_model_len=128, max_num_seqs=8, kv_cache_tokens=4096)
        engine = build_engine(decoder, speculation, config)
        requests = [engine.add_request(text, SamplingParams(max_tokens=16, temperature=0)) for text in texts]
        while engine.has_unfinished():
            engine.step()
        wanted = wanted or [request.answer for request in requests]
        assert [request.answer for request in requests] == wanted
    assert engine.stats.steps > 0
