"""Reads `quantization_config` of config.json, which says how a checkpoint's weights are quantised.

Strict: an unknown setting that would change the weights is refused, with an error that names its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fledge.config_checks import mapping, shown, whole_number
from fledge.errors import ModelError

# `quant_method` -> what is supported of it, shown in docs.
METHODS = {
    "compressed-tensors": "pack-quantized (int4, int8), int-quantized (int8), float-quantized (FP8)",
    "fp8": "e4m3; a scale per tensor, per output or per block",
    "awq": "4 bits, gemm layout",
    "gptq": "4 and 8 bits, act-order, gptq and gptq_v2",
    "auto-round": "packed as auto_gptq or auto_awq",
    "modelopt": "quant_algo FP8",
    "fbgemm_fp8": "e4m3, a scale per output",
}


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's linears are quantised."""

    method: str
    bits: int = 8
    layout: str = "fp8"  # fp8 | int8 | packed | awq | gptq
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False
    has_zeros: bool = False
    group_size: int | None = None  # inputs per scale; -1: all inputs; None: not given
    act_order: bool = False  # the inputs of a group need not be adjacent

    @property
    def format(self) -> str:
        """The weight format of the kernels: fp8, int4 or int8."""
        return "fp8" if self.layout == "fp8" else f"int{self.bits}"

    @property
    def description(self) -> str:
        kind = self.format.replace("fp8", "FP8")
        return self.method if "fp8" in self.method else f"{self.method}, {kind}"

    @property
    def marker(self) -> tuple[str, ...]:
        """Names of tensors of which every quantised linear has one."""
        packed = {"awq": ("qweight",), "gptq": ("qweight",), "packed": ("weight_packed",)}
        return packed.get(self.layout, ("weight_scale", "weight_scale_inv"))


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme that config.json describes; None: the weights are plain."""
    asked = mapping(config, "quantization_config")
    if not asked and (asked := mapping(config, "compression_config")):  # the key of early compressed-tensors
        asked.setdefault("quant_method", "compressed-tensors")
    if not asked:
        return None
    method = asked.get("quant_method")
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
    readers |= {"auto-round": _auto_round, "modelopt": _modelopt, "fbgemm_fp8": lambda asked: Scheme("fbgemm_fp8")}
    if not isinstance(method, str) or method not in readers:
        raise ModelError(f"quantization_config: quant_method {shown(method)} is not supported; supported: {', '.join(METHODS)}")
    return readers[method](asked)


def _must(asked: Mapping[str, Any], key: str, *allowed: Any) -> Any:
    """The value of `key`, which must be in `allowed`; the first of these is the default."""
    value = asked.get(key, allowed[0])
    if value not in allowed:
        known = ", ".join(map(str, allowed))
        raise ModelError(f"quantization_config: {key} {shown(value)} is not supported; supported: {known}")
    return value


def _group_size(asked: Mapping[str, Any]) -> int | None:
    if asked.get("group_size") is None:
        return None
    size = whole_number(asked, "group_size")
    if size < 1 and size != -1:
        raise ModelError(f"quantization_config: group_size must be positive or -1, not {size}")
    return size


def _awq(asked: Mapping[str, Any]) -> Scheme:
    _must(asked, "bits", 4)
    _must(asked, "version", "gemm", "GEMM")
    _must(asked, "zero_point", True)
    return Scheme("awq", 4, "awq", has_zeros=True, group_size=_group_size(asked))


def _gptq(asked: Mapping[str, Any]) -> Scheme:
    bits = int(_must(asked, "bits", 4, 8))
    _must(asked, "pack_dtype", "int32")
    version = _must(asked, "checkpoint_format", "gptq", "gptq_v2", None, "")
    # Modules that stay plain ("-:") are recognised by their tensors; other entries would give a module its own bits or groups.
    if changed := [name for name in mapping(asked, "dynamic") if not name.startswith("-:")]:
        raise ModelError(f"quantization_config: dynamic {shown(changed[0])} (bits by module) is not supported")
    less_one, order = version != "gptq_v2", bool(asked.get("desc_act"))
    return Scheme("gptq", bits, "gptq", zeros_less_one=less_one, has_zeros=True, group_size=_group_size(asked), act_order=order)


def _auto_round(asked: Mapping[str, Any]) -> Scheme:
    """Intel's AutoRound: tensors as in AutoGPTQ or AutoAWQ, depending on `packing_format`."""
    packing = _must(asked, "packing_format", "auto_round:auto_gptq", "auto_round:auto_awq")
    _must(asked, "data_type", "int")
    for name, own in mapping(asked, "extra_config").items():
        bits = own.get("bits", asked.get("bits")) if isinstance(own, Mapping) else own
        if bits != asked.get("bits") and bits != 16:  # 16: the module stays plain
            raise ModelError(f"quantization_config: extra_config {shown(name)} (bits by module) is not supported")
    read = _gptq if packing.endswith("gptq") else _awq
    return replace(read({key: asked[key] for key in ("bits", "group_size") if key in asked}), method="auto-round")


def _modelopt(asked: Mapping[str, Any]) -> Scheme:
    _must(asked, "quant_algo", None, "FP8")
    if asked.get("quant_algo") is None:
        raise ModelError("quantization_config: quant_algo is missing; supported: FP8")
    return Scheme("modelopt")


def _fp8(asked: Mapping[str, Any]) -> Scheme:
    _must(asked, "fmt", "e4m3", None)
    _must(asked, "activation_scheme", "dynamic", "static", None)
    return Scheme("fp8", block=_block(asked.get("weight_block_size"), "weight_block_size"))


def _block(sizes: Any, key: str) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise ModelError(f"quantization_config: {key} must be two sizes, not {shown(sizes)}")
    block = tuple(whole_number({key: size}, key) for size in sizes)
    if min(block) < 1:
        raise ModelError(f"quantization_config: {key} must be positive, not {shown(sizes)}")
    return block[0], block[1]


def _compressed(asked: Mapping[str, Any]) -> Scheme:
    _must(asked, "quantization_status", "compressed", "frozen", None)
    for key in ("sparsity_config", "transform_config"):
        part = mapping(asked, key)
        if part and part.get("format", key) != "dense":
            raise ModelError(f"quantization_config: {key} is not supported")
    groups = list(mapping(asked, "config_groups").values())
    if all(isinstance(group, Mapping) for group in groups):
        groups = [group for group in groups if group.get("weights", {}) is not None]  # others quantise only activations
    if not groups or not all(isinstance(group, Mapping) for group in groups):
        raise ModelError("quantization_config: config_groups must describe at least one group of linears")
    schemes = {_compressed_group(group, group.get("format") or asked.get("format")) for group in groups}
    if len(schemes) > 1:
        raise ModelError("quantization_config: config_groups that differ in their formats are not supported")
    return schemes.pop()


def _compressed_group(group: Mapping[str, Any], format: Any) -> Scheme:
    weights = mapping(group, "weights")
    kind, bits = _must(weights, "type", "int", "float"), int(_must(weights, "num_bits", 4, 8))
    strategy = _must(weights, "strategy", "group", "channel", "tensor", "block")
    _must(weights, "dynamic", False, None)
    options: dict[str, Any] = {}
    known = {("int", "pack-quantized"): "packed", ("int", "int-quantized"): "int8", ("float", "float-quantized"): "fp8"}
    known |= {("float", "naive-quantized"): "fp8", ("int", "naive-quantized"): "int8"}
    layout = known.get((kind, str(format)))
    if layout is None or (layout != "packed" and bits != 8):
        raise ModelError(f"quantization_config: format {shown(format)} of {bits}-bit {kind} weights is not supported")
    if strategy == "block":
        structure = weights.get("block_structure")
        if layout != "fp8" or structure is None:
            raise ModelError("quantization_config: strategy block is supported with a block_structure of FP8 weights only")
        if isinstance(structure, str):  # "128x128"
            structure = [int(part) if part.isdecimal() else part for part in structure.split("x")]
        options["block"] = _block(structure, "block_structure")
    if layout == "packed":
        options["group_size"] = _group_size(weights) if strategy == "group" else -1
        options["act_order"] = weights.get("actorder") in ("group", "dynamic", True)
    has_zeros = not weights.get("symmetric", True)
    if has_zeros and layout != "packed":
        raise ModelError("quantization_config: symmetric false is supported with pack-quantized weights only")
    return Scheme("compressed-tensors", bits, layout, has_zeros=has_zeros, **options)
