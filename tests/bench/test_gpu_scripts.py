"""The benchmark scripts can be imported, and the GPU scripts run on a CPU with a tiny model and without CUDA graphs."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fledge.kernels.quantization import QuantizedLinear, quantize
from tests.tiny import tiny_decoder, tiny_drafter, tiny_model_config

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_imports(name: str) -> None:
    module = importlib.import_module(name)
    assert Path(module.__file__).parent == FOLDER


@pytest.fixture
def bench():
    gpu = importlib.import_module("gpu")
    args = Namespace(
        concurrency=[2], depths=[2, 3], tokens=4, rounds=1, max_model_len=512, honour_stops=False,
        option_users=[2], option_requests=1, option_depth=3, option_parts="cycles,speculative,plain", option_names="", queued=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 100, (length,), generator=generator).tolist() for length in (5, 9, 17)]
    return gpu.Bench(args, tiny_decoder(), tiny_drafter(), prompts, device="cpu", capture=False)


def test_plain_and_speculative_speeds(bench) -> None:
    gpu = sys.modules["gpu"]
    found = gpu.spec(bench)
    assert bench.results["plain"]["2"]["tokens_per_s_per_user"] > 0
    assert found["2, chosen"]["usual_depth"] in (0, 1, 2, 3)
    assert found["2, depth 3"]["speed_up"] > 0
    assert found["2, depth 3"]["step_us"] > 0


def test_settings(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting still exists, and is restored after its measurement."""
    gpu = sys.modules["gpu"]
    bench.args.depths = [4]
    monkeypatch.setattr(gpu, "step_time", lambda bench, rows, count, depth: 1.0)
    before = gpu.triton_support.OVERLAP, gpu.launch_config.few_programs, gpu.decoder_module.PDL_BARRIER_LAYERS
    found = gpu.settings(bench)
    assert {"as it is", "every layer holds", "no overlap"} <= set(found)
    assert (gpu.triton_support.OVERLAP, gpu.launch_config.few_programs, gpu.decoder_module.PDL_BARRIER_LAYERS) == before


def test_identity_of_answers(bench) -> None:
    bench.args.identity_prompts, bench.args.identity_tokens = 3, 4
    found = json.loads(json.dumps(sys.modules["gpu"].identity(bench)))
    assert len(found["greedy"]) == len(found["seeded"]) == 9
    assert all(pair["of"] == 3 for pair in found["greedy"].values())
    assert found["greedy: all equal"]


def test_options(bench) -> None:
    gpu, options = sys.modules["gpu"], importlib.import_module("gpu_options")
    found = json.loads(json.dumps(gpu.options(bench)))
    assert list(found["depth 3, 2 users"]) == [*options.option_table(128, 4), options.MIXED]
    for way in ("plain", "depth 3"):
        assert all(run["ratio"] > 0 for run in found[f"{way}, 2 users"].values())
    assert len(found["cycles"]) == 7
    assert all(run["replay_us"] > 0 and run["as_run_us"] > 0 for run in found["cycles"].values())


def test_mask_bans_only_its_tokens() -> None:
    options = importlib.import_module("gpu_options")
    mask = options.BannedTokens([3, 127], 128)
    words = torch.full((4,), -1, dtype=torch.int32)
    mask.fill([], words)
    banned = [token for token in range(128) if not words[token // 32].item() >> token % 32 & 1]
    assert banned == [3, 127]
    assert mask([], torch.zeros(128)).isinf().nonzero().flatten().tolist() == [3, 127]


def test_mixed_options_are_sixteen_different_ones() -> None:
    settings = importlib.import_module("gpu_options").mixed_settings(128, 64)
    assert len(settings) == 16
    assert len({str(sorted(one.items(), key=str)) for one in settings}) == 16


def test_all_plain_linears_on_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """All plain linears use cuBLAS whatever their shape, quantised ones do not; dispatch is restored afterwards."""
    forms = importlib.import_module("gpu_linear_forms")
    dispatch = forms.dispatch
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    ran: list[str] = []
    monkeypatch.setattr(dispatch, "cublas_linear", lambda *_, order, **__: ran.append(f"cublas, {order.slices} slices"))
    monkeypatch.setattr(dispatch, "tiled_linear", lambda *_, order, **__: ran.append(f"tiles, {order.slices} slices"))
    x, weight = torch.zeros(1, 64), torch.zeros(40, 64)
    dispatch.linear(x, weight)
    with forms.on_cublas():
        dispatch.linear(x, weight)
        dispatch.linear(x, quantize(weight, 8))
    dispatch.linear(x, weight)
    assert ran == ["tiles, 4 slices", "cublas, 1 slices", "tiles, 4 slices", "tiles, 4 slices"]


# models of a published shape


@pytest.fixture
def shape_bench(monkeypatch: pytest.MonkeyPatch):
    sizes = importlib.import_module("gpu_sizes")
    monkeypatch.setattr(sizes, "PREFILL_PROMPTS", 2)
    monkeypatch.setattr(sizes, "PREFILL_LENGTH", 70)
    monkeypatch.setattr(sizes, "LOOP_TOKENS", 6)
    args = Namespace(
        concurrency=[1, 2], step_depth=3, cublas=True, loop_users=[1, 2], rounds=1, vllm_depths=[3], no_vllm_plain=False,
        vllm_path="", vllm_memory=0.9, vllm_seconds=60,
    )  # fmt: skip
    config = tiny_model_config("Qwen3ForCausalLM", num_layers=6, max_positions=2048)
    return sizes.ShapeBench("tiny", config, args, device="cpu", capture=False)


def test_steps_prefill_and_loop_of_a_shape(shape_bench, capsys) -> None:
    sizes = sys.modules["gpu_sizes"]
    for stage in ("steps", "prefill", "loop"):
        shape_bench.results[stage] = sizes.SHAPE_STAGES[stage](shape_bench)
    found = json.loads(json.dumps(shape_bench.results))
    names = [f"{rows} rows, {what}" for rows in (1, 2) for what in ("plain", "depth 3")]
    assert all(found["steps"][name][key] > 0 for name in names for key in ("us", "cublas_us", "least_us", "share"))
    assert found["prefill"]["tokens_per_s"] > 0
    assert list(found["loop"]) == ["1", "2"]
    sizes.print_table(shape_bench.results)
    assert "2 rows, depth 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "billions", "head_is_tied"),
    [
        ("135m", 0.135, True),
        ("0.5b", 0.494, True),
        ("1.5b", 1.544, True),
        ("8b", 8.03, False),
        ("14b", 14.77, False),
        ("32b", 32.76, False),
        ("30b-a3b", 30.53, False),
        ("8b-int4", 8.03, False),
    ],
)
def test_shapes_are_those_published(name: str, billions: float, head_is_tied: bool) -> None:
    shapes = importlib.import_module("gpu_shapes")
    config = shapes.SHAPES[name]
    assert shapes.num_parameters(config) / 1e9 == pytest.approx(billions, rel=0.004)
    assert config.tie_embeddings == head_is_tied


@pytest.mark.parametrize("kind", ["experts", "8b-fp8", "8b-int4"])
def test_steps_of_experts_and_of_quantised_shapes(kind: str, shape_bench) -> None:
    """Runs the GPU code paths with reference implementations of the kernels."""
    sizes = sys.modules["gpu_sizes"]
    small = {"num_layers": 6, "max_positions": 2048, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    if kind == "experts":
        shape_bench.config = tiny_model_config("Qwen3MoeForCausalLM", num_layers=6, max_positions=2048)
    else:
        shape_bench.name, shape_bench.config = kind, tiny_model_config(**small)
    shape_bench.args.cublas = False
    found = sizes.steps(shape_bench)
    assert all(found[f"2 rows, {what}"]["us"] > 0 for what in ("plain", "depth 3"))
    formats = {m.quantized.format for m in shape_bench.decoder.modules() if isinstance(m, QuantizedLinear)}
    assert formats == {"experts": set(), "8b-fp8": {"fp8"}, "8b-int4": {"int4"}}[kind]


def test_least_times_of_experts_and_of_quantised_weights() -> None:
    """With one row only bandwidth counts: the experts of one token, and the bits per weight."""
    shapes = importlib.import_module("gpu_shapes")
    moe, dense = shapes.Work(shapes.SHAPES["30b-a3b"], None), shapes.Work(shapes.SHAPES["8b"], None)
    assert moe.all_weights == pytest.approx(61.06e9, rel=0.01)
    assert moe.cycle_us(1, 0, 0) == pytest.approx(
        1e6 * 2 * (3.35e9 - 0.311e9) / 4.8e12, rel=0.02
    )  # 3.3B active parameters, without the embedding
    assert moe.cycle_us(64, 0, 0) > 8 * moe.cycle_us(1, 0, 0)
    fp8, int4 = (shapes.Work(shapes.SHAPES["8b"], None, layer_bits=bits) for bits in (8.0, 4 + 48 / 128))
    assert 1.7 < dense.cycle_us(1, 0, 0) / fp8.cycle_us(1, 0, 0) < 2
    assert 2.6 < dense.cycle_us(1, 0, 0) / int4.cycle_us(1, 0, 0) < 3.7


def test_random_networks_have_the_type_and_draft_vocabulary_asked_for() -> None:
    shapes = importlib.import_module("gpu_shapes")
    config = tiny_model_config("Qwen2ForCausalLM", num_layers=6, vocab_size=64_000, tie_embeddings=True)
    decoder = shapes.random_decoder(config, "cpu")
    drafter = shapes.random_drafter(shapes.drafter_config(config), "cpu")
    assert {parameter.dtype for parameter in [*decoder.parameters(), *drafter.parameters()]} == {torch.bfloat16}
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert drafter.config.version == "3.1"
    ids = drafter.target_ids(torch.arange(32_000))
    assert ids.diff().min() > 0
    assert ids.max() < 64_000


FAKE_VLLM = """
from collections import namedtuple
__version__ = "0"
Out, Text = namedtuple("Out", "request_id finished outputs"), namedtuple("Text", "token_ids")
SamplingParams = lambda **options: options
class LLM:
    def __init__(self, model, **options):
        assert options["load_format"] == "dummy"
        self.llm_engine, self.running = self, {}
    def add_request(self, name, prompt, params):
        assert prompt["prompt_token_ids"]
        self.running[name] = [0, params["max_tokens"]]
    def step(self):
        outs = []
        for name, state in list(self.running.items()):
            state[0] += 1
            done = state[0] == state[1]
            outs.append(Out(name, done, [Text([1] * state[0])]))
            if done:
                del self.running[name]
        return outs
"""


def test_vllm_with_dummy_weights_is_measured_in_its_own_process(shape_bench, tmp_path: Path) -> None:
    """Runs the script's loop on a stub of vLLM's engine."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    shape_bench.args.vllm_path = str(tmp_path)
    found = sys.modules["gpu_sizes"].vllm(shape_bench)
    assert "problem" not in found
    assert set(found["steps"]) == {f"{rows} rows, {what}" for rows in (1, 2) for what in ("plain", "depth 3")}
    assert found["prefill"]["tokens_per_s"] > 0
    assert set(found["loop"]) == {"1", "2"}


def test_vllm_that_fails_is_a_problem_not_an_error(shape_bench, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no such kernel')")
    shape_bench.args.vllm_path = str(tmp_path)
    assert "no such kernel" in sys.modules["gpu_sizes"].vllm(shape_bench)["problem"]


def test_launch_configs_of_linears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The whole script on a small model, with a GPU's dispatch and the reference's results; then the table it fills."""
    from fledge.kernels.linear import dispatch, summation

    linears, forms = (importlib.import_module(name) for name in ("gpu_linears", "gpu_linear_forms"))
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    for name, value in {
        "MODELS": {"tiny": forms.layer("tiny", 64, 128, 64, 96, 256, True)},
        "ROWS": {"tiny": (1, 16, 64)},
        "LAYERS": {"tiny": 2},
        "DEVICE": "cpu",
        "compile_share": lambda *_: None,
    }.items():
        monkeypatch.setattr(linears, name, value)
    timed = []

    def graph_time(calls, flush) -> float:
        calls[0]()
        timed.append(len(calls))
        return float(len(timed) % 7 + 1)

    monkeypatch.setattr(linears, "graph_time", graph_time)
    monkeypatch.setattr(linears, "tiled_head", lambda hidden, weight, *_, **__: linears.choose(hidden @ weight.t()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    results = tmp_path / "linears.json"
    monkeypatch.setattr(sys, "argv", ["gpu_linears.py", "--models", "tiny", "--json", str(results), "--workers", "0"])
    linears.main()
    report = json.loads(results.read_text())
    assert len(report["lines"]) == 4 * 3 + 4
    assert all(line["best_us"] == min(line["forms"].values()) and not line["wrong"] for line in report["lines"])
    assert set(report["other bits, of 255"]["tiny"].values()) == {0}
    assert set(timed) == {1, 4, 20}
    assert [set(line) for line in report["layers"]] == [
        {"model", "rows", "before", "rules", "cublas", "best alone", "best without prefetch", "best"}
    ] * 3
    assert all(line["best"] <= min(line["rules"], line["best alone"]) for line in report["layers"])

    table = tmp_path / "measured.py"
    table.write_text(forms.MEASURED.read_text())
    forms.fill(report["lines"], table)
    filled = {}
    exec(table.read_text(), filled)
    monkeypatch.setattr(dispatch, "CONFIGS", filled["CONFIGS"])
    for line in report["lines"]:
        shape = (line["rows"], line["K"], line["N"], "plain", torch.bfloat16, torch.device("cuda", 0))
        chosen = dispatch.choose_kernel(dispatch.Case(*shape, gated=line["linear"] == "gate_up"))
        assert list(chosen) == [line["form"][0], tuple(line["form"][1])]


def test_launch_configs_in_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The whole script on a small model with made-up times; the table it writes chooses the fastest kernel."""
    from fledge.kernels.linear import dispatch, summation

    steps, forms = (importlib.import_module(name) for name in ("gpu_step_forms", "gpu_linear_forms"))
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    monkeypatch.setattr(dispatch, "CONFIGS", {(64, 96, False): ((16, "register_mma", (8, 0)), (64, "register_mma", ()))})
    monkeypatch.setattr(dispatch, "multiprocessors", lambda _: dispatch.MEASURED_MULTIPROCESSORS)
    kinds = forms.layer("tiny", 64, 128, 64, 96, 256, True)
    cases = [dispatch.Case(16, k.inputs, k.outputs, "plain", torch.bfloat16, torch.device("cuda", 0), k.gated) for k in kinds]

    def step_us(*_: object) -> float:
        return 10.0 - sum(dispatch.choose_kernel(case)[0] == "staged_mma" for case in cases[:4])

    table = tmp_path / "measured.py"
    table.write_text(forms.MEASURED.read_text())
    batch = SimpleNamespace(
        device=torch.device("cuda", 0),
        kv_bucket=lambda _: (),
        record=lambda _: None,
        graphs=SimpleNamespace(graphs={}, pool=None),
        cache=SimpleNamespace(keys=torch.zeros(1), values=torch.zeros(1)),
    )
    engine = SimpleNamespace(executor=SimpleNamespace(batch=batch))
    monkeypatch.setattr(steps, "ShapeBench", lambda *_: SimpleNamespace(build=lambda *_: engine))
    monkeypatch.setattr(steps, "MODELS", {"tiny": kinds})
    monkeypatch.setattr(steps, "SHAPES", {"tiny": None})
    monkeypatch.setattr(steps, "step_us", step_us)
    monkeypatch.setattr(steps, "write_configs", lambda configs: forms.write_configs(configs, table))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    words = ["--model", "tiny", "--rows", "16", "--few", "24", "--fill", "--json", str(tmp_path / "steps.json")]
    monkeypatch.setattr(sys, "argv", ["gpu_step_forms.py", *words])
    steps.main()
    report = json.loads((tmp_path / "steps.json").read_text())
    assert [(one["few_programs"], one["us"]) for one in report["steps"]] == [(48, 6.0), (24, 6.0)]
    filled = {}
    exec(table.read_text(), filled)
    assert filled["CONFIGS"][64, 96, False][1] == (64, "register_mma", ())  # the entry for more rows is unchanged
    monkeypatch.setattr(dispatch, "CONFIGS", filled["CONFIGS"])
    assert {dispatch.choose_kernel(case)[0] for case in cases[:4]} == {"staged_mma"}


def test_linear_without_a_launch_config_keeps_the_rules_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no launch config of a linear ran, the choice for the layer and the run continue."""
    linears, forms = (importlib.import_module(name) for name in ("gpu_linears", "gpu_linear_forms"))
    kinds = [kind for kind in forms.layer("tiny", 64, 128, 64, 96, 256, True) if not kind.head]
    chain = object.__new__(linears.Chain)
    chain.model, chain.parts = "tiny", [Namespace(kind=kind) for kind in kinds]
    monkeypatch.setattr(linears, "choose_by_rules", lambda kind, rows: ("tiles", ()))
    form = ("register_mma", (8, 0))
    lines = [
        {"model": "tiny", "linear": kind.name, "rows": 1, "form": form, "forms": {"a": 1.0}, "by_name": {"a": form}}
        for kind in kinds
    ]
    lines[0] |= {"form": None, "forms": {}, "by_name": {}}
    monkeypatch.setattr(chain, "time", lambda rows, forms=None, **way: 0.5 if forms else 1.0, raising=False)
    chain.choose(lines, 1)
    assert [line["form"] for line in lines] == [("tiles", ()), *[form] * 3]


def test_launch_configs_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates exist for weights with several slices and are few; longer prefills use the same choice."""
    from fledge.kernels.linear import dispatch, summation

    forms = importlib.import_module("gpu_linear_forms")
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    monkeypatch.setattr(dispatch, "supports_wgmma", lambda _: True)
    kinds = {(kind.model, kind.name): kind for model in forms.MODELS.values() for kind in model}

    def found(model: str, name: str, rows: int) -> list[tuple[int, ...]]:
        return [numbers for kernel, numbers in forms.candidates(kinds[model, name], rows) if kernel == "tma_tiles"]

    for name, rows in (("qkv", 256), ("o", 1024), ("down", 1024), ("down", 4096)):
        assert 2 <= len(found("1.5b", name, rows)) <= 8, (name, rows)
    assert found("8b", "down", 4096)
    assert all(form.sums != forms.tma_tiles.MEMORY for form in found("135m", "gate_up", 4096))
    assert not found("1.5b", "qkv", 64), "a small weight"
    assert not found("8b", "qkv", 1024), "one slice"
    for name in ("qkv", "o", "gate_up", "down"):
        streamed = [forms.tma_tiles.LaunchConfig(*numbers) for numbers in found("8b", name, 1)]
        assert {form.early for form in streamed} == {0, 1}, name
        assert any(form.sums == forms.tma_tiles.PROGRAMS for form in streamed) == (name == "down"), name

    form = ["tma_tiles", list(found("1.5b", "down", 4096)[0])]
    lines = [{"K": 8960, "N": 1536, "linear": "down", "rows": rows, "form": form} for rows in (1024, 4096)]
    monkeypatch.setattr(dispatch, "CONFIGS", forms.filled(lines))
    case = dispatch.Case(8192, 8960, 1536, "plain", torch.bfloat16, torch.device("cuda", 0))
    assert list(dispatch.choose_kernel(case)) == ["tma_tiles", tuple(form[1])]
