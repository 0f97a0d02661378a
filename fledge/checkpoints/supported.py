"""What targets are supported, as Markdown, from the tables that the readers use.

`python -m fledge.checkpoints.supported > docs/models.md` writes the page; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fledge.checkpoints.gguf_config import ARCHITECTURES
from fledge.checkpoints.quantization_config import METHODS
from fledge.checkpoints.quantized import KEPT
from fledge.config import TEXT_PARTS
from fledge.config_parts import RopeConfig
from fledge.families import FAMILIES, FOREIGN
from fledge.kernels.formats.gguf_blocks import FORMATS
from fledge.kernels.quantization import BITS

HEAD = """# Models

Made by `python -m fledge.checkpoints.supported` from the tables that the readers use; a test compares the two.
"""
FORMAT_OF = {"awq": ("int4",), "gptq": ("int4", "int8"), "fp8": ("fp8",), "compressed-tensors": ("int4", "int8", "fp8")}
FORMAT_OF |= {"auto-round": ("int4", "int8"), "modelopt": ("fp8",), "fbgemm_fp8": ("fp8",)}
DEVICES = {"cpu": "CPU", "cuda": "GPU"}


def page() -> str:
    return "\n".join([HEAD, *_families(), *_refused(), *_formats(), *_own()])


def _families() -> Iterable[str]:
    yield "## Families\n"
    yield "All give auxiliary hidden states at any layer, are drafted for on CPU and GPU, and trained against.\n"
    rows = []
    for architecture, family in FAMILIES.items():
        gguf = f"`{family.gguf}`" if family.gguf in ARCHITECTURES else "no"
        also = [f"`{whole}` (text alone)" for whole, part in TEXT_PARTS.items() if part == architecture]
        names = ", ".join([f"`{architecture}`", *also])
        rows.append((family.name, names, family.models, family.sets_apart or "none", gguf))
    yield from _table(("family", "architectures", "models", "set apart from Llama by", "GGUF"), rows)
    kinds = ", ".join(RopeConfig.KINDS)
    yield f"\nRope scaling: {kinds}; longrope (su) for Phi. With longrope the longest text that an engine serves decides: up to"
    yield "the original length the short factors are used, `--max-model-len` lowers it.\n"


def _refused() -> Iterable[str]:
    yield "Another architecture is refused by name, and what is close to a family by the key of config.json that differs:"
    yield ", ".join(f"`{key}`" for key in FOREIGN) + ", an activation, a rope type, a kind of layer that is not known, a"
    yield "tensor that is missing or left over.\n"


def _formats() -> Iterable[str]:
    yield "## Quantised checkpoints\n"
    yield "`quantization_config` of config.json says how. Activations and KV cache stay unquantised, whatever it says.\n"
    rows = []
    for method, what in METHODS.items():
        rows.append((f"`{method}`", what, *(_on(method, device) for device in DEVICES)))
    yield from _table(("`quant_method`", "read", *DEVICES.values()), rows)
    yield "\nKept: stays in the checkpoint's format, to the bit. Plain: dequantised at load. Training uses plain weights."
    yield "Where it says kept, these are dequantised at load all the same, and the log says how many:\n"
    yield "- 8 bits with zero points"
    yield "- integer scales that fp16 does not hold"
    yield "- FP8 with a partial last block"
    yield "- on a GPU, experts with act-order, and groups that 32 does not divide"
    yield "- FP8 on a GPU before Ada (compute capability below 8.9)\n"


def _on(method: str, device: str) -> str:
    words = {True: "kept", False: "plain"}
    by_format = {name: words[name in KEPT[device]] for name in FORMAT_OF[method]}
    if len(set(by_format.values())) == 1:
        return next(iter(by_format.values()))
    return ", ".join(f"{name} {how}" for name, how in by_format.items())


def _own() -> Iterable[str]:
    yield "## Formats of plain and GGUF checkpoints\n"
    *others, last = BITS
    names = f"`{'`, `'.join(others)}` or `{last}`"
    yield f"Plain weights: safetensors in F32, F16 or BF16; `--quantization` {names} quantises them when loaded (`fp8` on a"
    yield "GPU of compute capability 8.9 or more)."
    yield f"GGUF: {', '.join(sorted(FORMATS))}, of the architectures {', '.join(f'`{name}`' for name in ARCHITECTURES)}."


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    for row in (heading, ["---"] * len(heading), *rows):
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print(page())
