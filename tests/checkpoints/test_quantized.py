"""Pre-quantised checkpoints: each layout against its packer, whole checkpoints against a dequantised twin."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints.hf import load_decoder
from fledge.checkpoints.quantization_config import METHODS, read_scheme
from fledge.checkpoints.quantized import KEPT
from fledge.checkpoints.supported import page
from fledge.config import MoEConfig
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.errors import ModelError, UserError
from fledge.families import FAMILIES
from fledge.kernels.formats.fp8 import read_fp8
from fledge.kernels.formats.packed_int import read_awq, read_compressed, read_gptq
from fledge.kernels.linear.packed import PackedLinear
from fledge.kernels.quantization import QuantizedLinear, dequantize
from fledge.models.decoder import Decoder, causal_attend
from fledge.ops.cpu_ops import CpuOps
from fledge.sampling import SamplingParams
from tests.checkpoints.packers import (
    AWQ,
    CHECKPOINTS,
    CT_FP8,
    CT_INT8,
    FP8,
    GPTQ,
    awq_tensors,
    compressed_tensors,
    gptq_tensors,
    grouped,
    write_quantised,
)
from tests.kernels.support import fp8_weight
from tests.oracle import run
from tests.tiny import tiny_decoder

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
EXACT = [name for name in CHECKPOINTS if "fp8" not in name]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("layout", "symmetric"),
    # 8 bits with zero points have no exact format of ours; see below.
    [*product(["awq", "gptq", "gptq_v2", "compressed"], [False, True]), ("gptq 8 bits", True)],
)
def test_layouts(layout: str, symmetric: bool, act_order: bool) -> None:
    """Exact when unpacked, and in our format, whose columns act-order reorders (asymmetric: to 1e-6)."""
    bits = 8 if "8" in layout else 4
    weight = grouped(torch.randn(40, 384), bits, 128, symmetric=symmetric, act_order=act_order and layout != "awq")
    if layout == "awq":
        parts = awq_tensors(weight)
        found = read_awq(parts["qweight"], parts["qzeros"], parts["scales"])
    elif layout == "compressed":
        parts = compressed_tensors(weight, symmetric=symmetric, act_order=act_order)
        zeros, g_idx = parts.get("weight_zero_point"), parts.get("weight_g_idx")
        found = read_compressed(parts["weight_packed"], parts["weight_scale"], zeros, g_idx, 384, 4)
    else:
        v2 = layout == "gptq_v2"
        parts = gptq_tensors(weight, bits, v2=v2)
        found = read_gptq(parts["qweight"], parts["qzeros"], parts["scales"], parts["g_idx"], bits, zeros_less_one=not v2)
    assert torch.equal(found.dequantize(), weight.values())
    assert (found.order_I is not None) == (act_order and layout != "awq")
    exact = found.exact()
    values = dequantize(exact)
    columns = torch.arange(384) if found.order_I is None else found.order_I
    assert exact.bits == bits
    torch.testing.assert_close(values, weight.values()[:, columns], rtol=0, atol=0 if symmetric else 1e-6)
    order = torch.randperm(40)
    assert torch.equal(found.rows(order).dequantize(), weight.values()[order])


def test_one_group_of_all_inputs_is_split() -> None:
    """A group of all inputs is split, because the C kernel sums a group in 32-bit integers."""
    weight = grouped(torch.randn(32, 1024), 4, 1024, symmetric=False)
    parts = gptq_tensors(weight)
    found = read_gptq(parts["qweight"], parts["qzeros"], parts["scales"], parts["g_idx"], 4, zeros_less_one=True).exact()
    assert found.group_size == 256
    torch.testing.assert_close(dequantize(found), weight.values(), rtol=0, atol=1e-6)


def test_scales_outside_fp16_have_no_exact_format() -> None:
    weight = grouped(1e-6 * torch.randn(32, 128), 4, 128, symmetric=True, dtype=torch.bfloat16)
    assert (weight.scales_OG.half().float() != weight.scales_OG.float()).any()
    parts = compressed_tensors(weight, symmetric=True, act_order=False)
    assert read_compressed(parts["weight_packed"], parts["weight_scale"], None, None, 128, 4).exact() is None


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_fp8(block: tuple[int, int] | None) -> None:
    weight = torch.randn(200, 300)
    made = fp8_weight(weight, block)
    read = read_fp8(made.codes_OI, made.scales_OG[:: block[0]] if block else made.scales_OG, block)
    assert torch.equal(read.dequantize(), made.dequantize())
    assert ((made.dequantize() - weight).abs() <= weight.abs() / 16 + made.scales_OG.max() * 2**-9).all()


@pytest.mark.parametrize("offsets", ["none", "narrow", "wide"])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_c_reads_offsets_and_order(offsets: str, rows: int) -> None:
    weight = grouped(torch.randn(72, 512), 4, 128, symmetric=offsets == "none", act_order=True)
    parts = gptq_tensors(weight)
    found = read_gptq(parts["qweight"], parts["qzeros"], parts["scales"], parts["g_idx"], 4, zeros_less_one=True)
    exact = found.exact()
    if offsets == "narrow":
        exact = replace(exact, offsets=exact.offsets.half())
    linear = QuantizedLinear(exact, torch.randn(72), found.order_I)
    x = torch.randn(rows, 512)
    packed = PackedLinear(linear)
    assert packed.native is not None
    torch.testing.assert_close(packed(x), linear(x), rtol=1e-3, atol=1e-3)
    if offsets != "narrow":  # fp16 rounds narrow offsets
        torch.testing.assert_close(linear(x), x @ weight.values().t() + linear.bias, rtol=1e-3, atol=1e-3)
    assert torch.equal(packed(x)[-1:], packed(x[-1:]))


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory) -> tuple[str, Path, Path]:
    decoder = tiny_decoder(2, "Qwen2ForCausalLM", **SIZES)
    return request.param, *write_quantised(decoder, tmp_path_factory.mktemp(request.param), request.param)


@torch.no_grad()
def test_a_checkpoint_equals_its_dequantised_twin(checkpoint) -> None:
    name, packed, twin = checkpoint
    tokens = torch.randint(0, 128, (40,))
    found, wanted, kept = load_decoder(packed), load_decoder(twin), load_decoder(packed, keep=KEPT["cpu"])
    _assert_same(found, wanted)
    quantised = [module for module in kept.modules() if isinstance(module, QuantizedLinear)]
    assert len(quantised) == (8 if name in EXACT else 0)
    everything = load_decoder(packed, keep=KEPT["cuda"])  # the reference kernels compute it here
    assert sum(isinstance(module, QuantizedLinear) for module in everything.modules()) == 8
    logits = [d.logits(d(tokens, torch.arange(40), causal_attend()).hidden_ND) for d in (wanted, kept, everything)]
    assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[0].abs().max()
    assert (logits[0] - logits[2]).abs().max() < 1e-3 * logits[0].abs().max()


def test_checkpoint_gives_the_same_texts_as_its_twin(checkpoint) -> None:
    """On the C kernels, with speculation on the quantised one. In fp32: in fp16 the summation order would change texts."""
    _, packed, twin = checkpoint
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, kv_cache_tokens=1024)
    params, prompts = SamplingParams(max_tokens=24, temperature=0), [[3, 7, 100], [55], list(range(40))]
    wanted = run(build_engine(load_decoder(twin), Speculation("none"), config), prompts, params)
    decoder = load_decoder(packed, keep=KEPT["cpu"])
    engine = build_engine(decoder, Speculation("ngram"), config)
    assert isinstance(engine.executor.ops, CpuOps)
    assert run(engine, prompts, params) == wanted


@torch.no_grad()
@pytest.mark.parametrize("name", ["gptq", "awq", "ct-int4", "ct-fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_head(name: str, tied: bool, tmp_path: Path) -> None:
    """A quantised head is not tied to the embedding, whatever the config says."""
    packed, twin = write_quantised(tiny_decoder(2, **SIZES), tmp_path, name, also=("lm_head.weight",))
    _change_config(packed, tie_word_embeddings=tied)
    tokens, wanted = torch.arange(30), load_decoder(twin)
    for keep in (frozenset(), KEPT["cuda"]):
        found = load_decoder(packed, keep=keep)
        assert isinstance(found.lm_head, QuantizedLinear) == bool(keep)
        logits = [d.logits(d(tokens, tokens, causal_attend()).hidden_ND) for d in (wanted, found)]
        assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[0].abs().max()


def test_biases_of_zeros_beside_quantised_linears(tmp_path: Path) -> None:
    """AutoGPTQ wrote zero biases for all linears; a bias that is not zero is refused."""
    packed, _ = write_quantised(tiny_decoder(**SIZES), tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    biases = {name.replace("scales", "bias"): torch.zeros(x.shape[1]) for name, x in tensors.items() if "scales" in name}
    save_file(tensors | biases, packed / "model.safetensors")
    load_decoder(packed)
    biases["model.layers.1.mlp.up_proj.bias"][3] = 1.0
    save_file(tensors | biases, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"not expected: model\.layers\.1\.mlp\.up_proj\.bias$"):
        load_decoder(packed)


def _change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_experts(tmp_path: Path) -> None:
    decoder = tiny_decoder(1, "Qwen3MoeForCausalLM", **SIZES | {"num_layers": 4}, moe=MoEConfig(4, 2, 128, layers=(0, 2, 3)))
    packed, twin = write_quantised(decoder, tmp_path, "awq")
    config = EngineConfig(device="cpu", max_model_len=128, max_num_seqs=4, kv_cache_tokens=1024)
    params, prompts = SamplingParams(max_tokens=24, temperature=0), [[3, 7, 100], [55]]
    texts = [
        run(build_engine(load_decoder(f, keep=KEPT["cpu"]), Speculation("none"), config), prompts, params)
        for f in (packed, twin)
    ]
    assert texts[0] == texts[1]


FAMILIES_IN_FP8 = {
    "Qwen3MoeForCausalLM": {"moe": MoEConfig(4, 2, 128, layers=(0, 1))},
    "MixtralForCausalLM": {"moe": MoEConfig(4, 2, 128, layers=(0, 1))},
    "Phi3ForCausalLM": {"rotated": 24},
    "Gemma3ForCausalLM": {"windows": (8, None), "embedding_scale": 128**0.5},
    "Glm4ForCausalLM": {"rotated": 16},
}


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES_IN_FP8)
def test_blocks_of_fp8_in_every_layout(family: str, tmp_path: Path) -> None:
    packed, twin = write_quantised(tiny_decoder(1, family, **SIZES, **FAMILIES_IN_FP8[family]), tmp_path, "fp8-block")
    _assert_same(load_decoder(packed), wanted := load_decoder(twin))
    kept, tokens = load_decoder(packed, keep=KEPT["cuda"]), torch.arange(30)
    assert any(isinstance(module, QuantizedLinear) for module in kept.modules())
    logits = [d.logits(d(tokens, tokens, causal_attend()).hidden_ND) for d in (wanted, kept)]
    assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[0].abs().max()


@pytest.mark.parametrize("name", ["gptq", "ct-fp8"])
@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_a_quantised_router(family: str, name: str, tmp_path: Path) -> None:
    """In Qwen2-MoE the router is joined with the shared expert's gate, which is not quantised."""
    shared = 128 if "2" in family else 0
    decoder = tiny_decoder(1, family, **SIZES, moe=MoEConfig(8, 2, 128, shared == 0, shared, (0, 1)))
    packed, twin = write_quantised(decoder, tmp_path, name, also=("mlp.gate.weight",))
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, kv_cache_tokens=1024)
    params, prompts = SamplingParams(max_tokens=24, temperature=0), [[3, 7, 100], [55]]
    texts = [
        run(build_engine(load_decoder(f, keep=KEPT["cpu"]), Speculation("none"), config), prompts, params)
        for f in (packed, twin)
    ]
    assert texts[0] == texts[1]


def test_reordered_heads_of_phi(tmp_path: Path) -> None:
    """Rows of quantised weights are reordered in the same way as those of plain weights."""
    packed, twin = write_quantised(tiny_decoder(1, "Phi3ForCausalLM", **SIZES, rotated=24), tmp_path, "gptq-act-order")
    tokens, decoders = torch.arange(30), (load_decoder(twin), load_decoder(packed, keep=KEPT["cpu"]))
    logits = [d.logits(d(tokens, tokens, causal_attend()).hidden_ND) for d in decoders]
    assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[0].abs().max()


def test_quantising_twice_is_refused(tmp_path: Path) -> None:
    packed, _ = write_quantised(tiny_decoder(**SIZES), tmp_path, "gptq")
    config = EngineConfig(device="cpu", quantization="int8")
    with pytest.raises(UserError, match="is quantised already"):
        build_engine(str(packed), Speculation("none"), config, tokenizer=object())


CT = CHECKPOINTS["ct-int4"]
GROUP, FP8_GROUP = CT["config_groups"]["group_0"], CT_FP8["config_groups"]["group_0"] | {"format": "float-quantized"}


def _ct_weights(**change: Any) -> dict[str, Any]:
    return CT | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | change}}}


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}


def _fp8_block(structure: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
    return CT_FP8 | {"config_groups": {"a": {"weights": weights}}}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq", GPTQ | {"dynamic": {"-:.*lm_head.*": {}}}),
        ("gptq", AUTO_ROUND | {"sym": True, "data_type": "int", "extra_config": {"lm_head": {"bits": 16}}}),
        ("awq", AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}),
        ("fp8-tensor", {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
        ("ct-fp8", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}),
        ("ct-int4", CT | {"config_groups": {"a": GROUP, "b": GROUP | {"targets": ["re:.*self_attn$"], "weights": None}}}),
        ("ct-int4", CT | {"config_groups": {"a": GROUP, "b": GROUP | {"input_activations": {"num_bits": 8}}}}),  # same weights
        ("fp8-block", _fp8_block("128x128")),
    ],
    ids=lambda value: value if isinstance(value, str) else value["quant_method"],
)
def test_other_names_for_the_same_layouts(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    packed, twin = write_quantised(tiny_decoder(2, **SIZES), tmp_path, name)
    _change_config(packed, quantization_config=config)
    _assert_same(load_decoder(packed), load_decoder(twin))


@pytest.mark.parametrize(
    ("name", "key", "file"),
    [("ct-int4", "compression_config", "config.json"), ("fp8-tensor", "quantization", "hf_quant_config.json")],
)
def test_other_places_of_the_configuration(name: str, key: str, file: str, tmp_path: Path) -> None:
    """The key of early compressed-tensors, and modelopt's separate file."""
    packed, twin = write_quantised(tiny_decoder(2, **SIZES), tmp_path, name)
    content = CHECKPOINTS[name] if "int4" in name else {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    _change_config(packed, quantization_config=None)
    other = json.loads((packed / file).read_text()) if file == "config.json" else {}
    (packed / file).write_text(json.dumps(other | {key: content}))
    _assert_same(load_decoder(packed), load_decoder(twin))


@pytest.mark.parametrize(("name", "size"), [("gptq", 32), ("awq", 64), ("ct-int4", -1)])
def test_groups_are_as_the_configuration_says(name: str, size: int, tmp_path: Path) -> None:
    packed, _ = write_quantised(tiny_decoder(2, **SIZES), tmp_path, name)
    config = CHECKPOINTS[name] | {"group_size": size}
    if name == "ct-int4":
        config = _ct_weights(strategy="channel", group_size=None)
    _change_config(packed, quantization_config=config)
    with pytest.raises(ModelError, match=rf"in groups of 128, but quantization_config says group_size {size}"):
        load_decoder(packed)


def _assert_same(mine: Decoder, theirs: Decoder) -> None:
    for (name, one), (_, two) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        (AWQ | {"bits": 8}, "bits 8"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (GPTQ | {"bits": 3}, "bits 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8}}}, r"dynamic '\+:"),
        (GPTQ | {"dynamic": ["-:.*"]}, "dynamic"),
        (GPTQ | {"group_size": 0.5}, "group_size"),
        (GPTQ | {"group_size": -2}, "group_size"),
        ({"quant_method": ["gptq"]}, "quant_method"),
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type"),
        (AUTO_ROUND | {"bits": 2}, "bits 2"),
        (AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}}, "extra_config 'model.layers.0"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ({"quant_method": "modelopt"}, "quant_algo"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (CT | {"format": "marlin-24"}, "format 'marlin-24'"),
        (CT | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (CT | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (CT | {"config_groups": {}}, "config_groups"),
        (CT | {"config_groups": {"a": GROUP | {"weights": None}}}, "config_groups"),
        (CT | {"config_groups": {"a": 3}}, "config_groups"),
        (CT | {"format": ["pack-quantized"]}, "format"),
        (_fp8_block("axb"), "block_structure"),
        (_fp8_block("128"), "block_structure"),
        (_fp8_block({"rows": 128}), "block_structure"),
        (_ct_weights(num_bits=2), "num_bits 2"),
        (_ct_weights(strategy="tensor_group"), "strategy 'tensor_group'"),
        (_ct_weights(type="float"), "format 'pack-quantized' of 4-bit float"),
        (CT | {"config_groups": {"a": GROUP, "b": FP8_GROUP}}, "differ"),
        (
            CT_INT8 | {"config_groups": {"a": {"weights": {"num_bits": 8, "symmetric": False, "strategy": "channel"}}}},
            "symmetric",
        ),
    ],
)
def test_unknown_settings_are_refused_by_key(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_scheme({"quantization_config": config})


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-int4", "fp8-block"])
def test_tensors_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    packed, _ = write_quantised(tiny_decoder(**SIZES), tmp_path, name)
    tensors = load_file(packed / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj."
    scale = next(part for part in ("scales", "weight_scale", "weight_scale_inv") if layer + part in tensors)
    save_file(tensors | {layer + scale: torch.ones(3, 5)}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=scale):
        load_decoder(packed)
    if name == "gptq-act-order":
        save_file(tensors | {layer + "g_idx": torch.zeros(256, dtype=torch.int32)}, packed / "model.safetensors")
        with pytest.raises(ModelError, match="g_idx"):
            load_decoder(packed)
    dropped = {key: value for key, value in tensors.items() if not key.startswith(layer)}
    save_file(dropped, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.down_proj\.weight"):
        load_decoder(packed)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="not expected"):
        load_decoder(packed)


def test_models_page_is_up_to_date() -> None:
    """`python -m fledge.checkpoints.supported > docs/models.md` writes it."""
    written = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert written == page() + "\n"
    for name in (*FAMILIES, *METHODS):
        assert f"`{name}`" in written
