"""Checks that a row's attention has the same bits however it is batched, and measures attention kernels on a GPU.

    python benchmarks/gpu_attention.py [--checks] [--times] [--output results.json]

Kernels are compiled first, in parallel processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product

import torch

from benchmarks.gpu_kernels import graph_time
from fledge.config import RopeConfig
from fledge.kernels.attention.exact import SPLIT
from fledge.kernels.attention.launch_config import FEW, SOME
from fledge.kernels.attention.prefill_attention import prefill_attention_triton
from fledge.kernels.attention.rope_attention import rope_attention_triton
from fledge.kernels.attention.rope_cache import rope_cache_triton
from fledge.kernels.triton_support import jit, tl
from fledge.models.layers import Rotary

try:
    from benchmarks import old_rope_attention  # optional: another version to compare with
except ImportError:
    old_rope_attention = None

DEVICE, PAGE = torch.device("cuda"), 128
SHAPES = {"135m": (9, 3, 64), "1.5b": (12, 2, 128), "8b": (32, 8, 128)}  # query heads, key/value heads, head size
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (200, 400, 2000, 8000)
NEW = {"135m": (1, 4, 6), "1.5b": (1, 4), "8b": (1, 4)}
PROMPTS = {"4 x 2048": [2048] * 4, "1 x 8192": [8192], "16 x 512": [512] * 16, "1 x 200": [200]}
NUM_PROCESSES = 14


class Text:
    """A text of random queries, keys and values, with keys in scattered pages; `wanted`: its attention as one prompt."""

    def __init__(self, shape: tuple[int, int, int], length: int, *, norms: bool = False, window: int | None = None) -> None:
        torch.manual_seed(length)
        self.heads, self.kv_heads, self.size = shape
        self.length, self.window = length, window
        num_pages = -(-length // PAGE)
        self.pages = torch.randperm(num_pages + 3, device=DEVICE)[:num_pages].int()
        cache = (self.kv_heads, (num_pages + 3) * PAGE, self.size)
        self.keys, self.values = (torch.full(cache, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        width = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv = torch.randn(length, width, dtype=torch.bfloat16, device=DEVICE)
        self.qkv[:, : self.heads * self.size] *= 2
        weights = [torch.randn(self.size, device=DEVICE).bfloat16() for _ in range(2)]
        self.norms = (weights[0], weights[1], 1e-6) if norms else None
        self.table = Rotary(self.size, 16384, RopeConfig()).device_table(16384, DEVICE)
        self.wanted = self.prefilled([(0, length)], keys=self.keys, values=self.values)

    def prefilled(self, parts: list[tuple[int, int]], rows: int | None = None, **cache: torch.Tensor) -> torch.Tensor:
        """Prefills parts of the text as sequences of one pass, followed by a dummy row."""
        keys, values = (cache.get(name, getattr(self, name)) for name in ("keys", "values"))
        place = torch.cat([torch.arange(*part, device=DEVICE) for part in parts])
        qkv = torch.cat([self.qkv[place], torch.randn_like(self.qkv[:1])])
        slots = self.pages.long()[place // PAGE] * PAGE + place % PAGE
        rope_cache_triton(
            qkv, self.table, torch.cat([place, place[:1] * 0]), torch.cat([slots, slots[:1] * 0 - 1]), keys, values, self.norms
        )
        counts = torch.tensor([0] + [last - first for first, last in parts], device=DEVICE)
        out = prefill_attention_triton(
            qkv.view(len(qkv), -1, self.size)[:, : self.heads],
            keys,
            values,
            self.pages.expand(len(parts), -1),
            counts.cumsum(0).int(),
            torch.tensor([first for first, _ in parts], device=DEVICE).int(),
            PAGE,
            window=self.window,
            rows=rows,
        )
        assert not out[-1].any()
        return out[:-1].flatten(1)

    def decoded(self, starts: list[int], num_new: int, counts: list[int] | None = None, **way: object) -> torch.Tensor:
        """Decodes chains that start at these positions, [B, T, H * E]; checks what is written into the cache."""
        counts = counts or [num_new] * len(starts)
        place = torch.tensor(starts, device=DEVICE)[:, None] + torch.arange(num_new, device=DEVICE)
        keys, values = self.keys.clone(), self.values.clone()
        if len(starts) == 1:  # later positions must not be in the cache yet
            later = torch.arange(starts[0], self.length, device=DEVICE)
            slots = self.pages.long()[later // PAGE] * PAGE + later % PAGE
            keys[:, slots] = values[:, slots] = torch.nan
        out = rope_attention_triton(
            self.qkv[place.clamp(max=self.length - 1)].flatten(0, 1).contiguous(),
            self.table,
            *(torch.tensor(numbers, device=DEVICE).int() for numbers in (starts, counts)),
            keys,
            values,
            self.pages.expand(len(starts), -1),
            PAGE,
            norms=self.norms,
            window=self.window,
            **way,
        )
        if len(starts) == 1:
            written = torch.arange(starts[0] + counts[0], device=DEVICE)
            slots = self.pages.long()[written // PAGE] * PAGE + written % PAGE
            assert torch.equal(keys[:, slots], self.keys[:, slots]), "keys of a chain differ from those of a prompt"
            assert torch.equal(values[:, slots], self.values[:, slots])
        return out.view(len(starts), num_new, -1)


def texts() -> Iterator[tuple[str, Callable[[], Text]]]:
    for name, shape in SHAPES.items():
        yield name, partial(Text, shape, 2300)
    yield "135m, short", partial(Text, SHAPES["135m"], 500)
    yield "8b, norms", partial(Text, SHAPES["8b"], 1100, norms=True)
    yield "135m, window 700", partial(Text, SHAPES["135m"], 2300, window=700)
    yield "8b, window 40", partial(Text, SHAPES["8b"], 700, window=40)


def checks_of(text: Text) -> Iterator[tuple[str, bool]]:
    """Compares each way of batching rows with the whole prompt in one pass."""
    length, wanted = text.length, text.wanted
    yield "finite", bool(wanted.isfinite().all())
    for rows in (64, 128):
        yield f"prompt in tiles of {rows}", torch.equal(text.prefilled([(0, length)], rows), wanted)
    cuts = [0, 1, 17, 100, 129, SPLIT - 3, length - 5, length]
    cuts = sorted({cut for cut in cuts if cut <= length})
    parts = list(pairwise(cuts))
    yield "chunks apart", torch.equal(torch.cat([text.prefilled([part]) for part in parts]), wanted)
    yield "chunks together", torch.equal(text.prefilled(parts), wanted)
    starts = [0, 1, 15, 16, 63, 64, 200, SPLIT - 4, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT - 2, 2047, length - 40]
    starts = [start for start in starts if start <= length - 40]
    ways = {
        "": {},
        ", streamed": {"streamed": True},
        ", few": {"config": FEW},
        ", some": {"config": SOME},
        ", one": {"programs": 1},
    }
    for num_new, (name, way) in product((1, 4, 6, 17), ways.items()):
        if text.size == 128 and name == ", few" and num_new > 6:
            continue
        alone = all(torch.equal(text.decoded([s], num_new, **way)[0], wanted[s : s + num_new]) for s in starts)
        yield f"{num_new} new alone{name}", alone
        for copies in (1, 20):
            many = starts * copies
            found = text.decoded(many, num_new, **way)
            same = all(torch.equal(found[i], wanted[s : s + num_new]) for i, s in enumerate(many))
            yield f"{num_new} new in a batch of {len(many)}{name}", same
    counts = [min(i % 7, 6) for i in range(len(starts))]
    found = text.decoded(starts, 6, counts)
    same = all(torch.equal(found[i, :n], wanted[s : s + n]) for i, (s, n) in enumerate(zip(starts, counts, strict=True)))
    yield "chains of different lengths", same


def reference_error(text: Text) -> float:
    """The largest difference from attention in fp32; outputs are about 1 in size."""
    place = torch.arange(text.length, device=DEVICE)
    slots = text.pages.long()[place // PAGE] * PAGE + place % PAGE
    keys, values = (x[:, slots].float() for x in (text.keys, text.values))
    qkv = text.qkv.clone()
    nowhere = torch.full_like(place, -1)
    rope_cache_triton(qkv, text.table, place, nowhere, text.keys, text.values, text.norms)
    q = qkv.view(text.length, -1, text.size)[:, : text.heads].transpose(0, 1).float()
    ago = place[:, None] - place[None, :]
    seen = (ago >= 0) & (ago < (text.window or text.length))
    out = torch.nn.functional.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=seen, enable_gqa=True)
    return (out[0].transpose(0, 1).flatten(1) - text.wanted.float()).abs().max().item()


@jit
def _exp2(x_ptr, y_ptr, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y_ptr + place, tl.exp2(tl.load(x_ptr + place)))


def exp2_shifts_exactly() -> bool:
    """Whether subtracting a whole number from an argument on the grid changes only the exponent of exp2; `exact` needs this."""
    step = 2.0**-14
    x = (torch.arange(2**14, device=DEVICE) - 2**14 + 1) * step
    whole = torch.arange(0, 100, device=DEVICE)[:, None]
    shifted = (x - whole).float().contiguous()
    found = torch.empty_like(shifted)
    _exp2[(shifted.numel() // 1024,)](shifted, found, SIZE=1024)
    return torch.equal(torch.ldexp(found.double(), whole), found[:1].double().expand_as(found))


@torch.inference_mode()
def checks(only: str | None = None) -> dict[str, object]:
    found: dict[str, object] = {}
    if only is None:
        found["exp2"] = exp2_shifts_exactly()
        print(f"{'PASS' if found['exp2'] else 'FAIL'}  exp2 of a shifted number", flush=True)
    for name, make in texts():
        if only not in (None, name):
            continue
        text = make()
        failed, count = [], 0
        for what, passed in checks_of(text):
            count += 1
            if not passed:
                failed.append(what)
                print(f"FAIL  {name}: {what}", flush=True)
        error = reference_error(text)
        found[name] = {"checks": count, "failed": failed, "max_error": error}
        print(
            f"{'FAIL' if failed else 'PASS'}  {name}: {count - len(failed)} of {count}, largest error {error:.4f}", flush=True
        )
    return found


def decode_cases(name: str) -> Iterator[tuple[str, Callable, Callable | None]]:
    heads, kv_heads, size = SHAPES[name]
    table = Rotary(size, 16384, RopeConfig()).device_table(16384, DEVICE)
    for batch in BATCHES:
        pages = -(-(CONTEXTS[-1] + 8) // PAGE)
        caches = torch.empty(2, kv_heads, batch * pages * PAGE, size, device=DEVICE, dtype=torch.bfloat16).normal_()
        tables = torch.arange(batch * pages, device=DEVICE, dtype=torch.int32).view(batch, pages)
        for context, new in product(CONTEXTS, NEW[name]):
            width = next(width for width in (4, 16, pages) if width * PAGE >= context + new)
            qkv = torch.randn(batch * new, (heads + 2 * kv_heads) * size, device=DEVICE, dtype=torch.bfloat16)
            starts, counts = (torch.full((batch,), n, device=DEVICE, dtype=torch.int32) for n in (context, new))
            where = (qkv, table, starts, counts, *caches, tables[:, :width], PAGE)
            old = None if old_rope_attention is None else partial(old_rope_attention.rope_attention_triton, *where)
            yield f"batch {batch}, {new} new, {context} keys", partial(rope_attention_triton, *where), old
        del caches


def prompt_cases(name: str) -> Iterator[tuple[str, float, dict[str, Callable]]]:
    """Prefill cases: name, floating-point operations under a causal mask, and the kernels to time."""
    from torch.nn.attention.varlen import varlen_attn

    heads, kv_heads, size = SHAPES[name]
    for what, lengths in PROMPTS.items():
        pages = [-(-length // PAGE) for length in lengths]
        caches = torch.randn(2, kv_heads, sum(pages) * PAGE, size, device=DEVICE, dtype=torch.bfloat16)
        tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for index, count in enumerate(pages):
            tables[index, :count] = torch.arange(count) + sum(pages[:index])
        tables = tables.to(DEVICE)
        qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, size, device=DEVICE, dtype=torch.bfloat16)
        offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        starts = torch.zeros(len(lengths), device=DEVICE, dtype=torch.int32)
        where = (qkv[:, :heads], *caches, tables, offsets, starts, PAGE)
        ways: dict[str, Callable] = {"new": partial(prefill_attention_triton, *where)}
        for rows, stages in ((64, 2), (64, 3), (128, 2), (128, 3), (128, 4)):
            ways[f"{rows} rows, {stages} stages"] = partial(prefill_attention_triton, *where, rows=rows, stages=stages)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        bounds = (offsets, offsets, max(lengths), max(lengths))
        try:
            varlen_attn(q, k, v, *bounds, window_size=(-1, 0))
            ways["torch"] = partial(varlen_attn, q, k, v, *bounds, window_size=(-1, 0))
        except (TypeError, RuntimeError):
            ways["torch"] = partial(varlen_attn, q, k, v, *bounds, window_size=(-1, 0), enable_gqa=True)
        yield what, sum(4 * heads * size * length * (length + 1) / 2 for length in lengths), ways


@torch.inference_mode()
def times(name: str, *, measure: bool = True) -> dict[str, object]:
    """Times all kernels. Without `measure` every kernel runs once, to be compiled."""
    found: dict[str, object] = {}
    for what, new, old in decode_cases(name):
        if not measure:
            for run in (new, old) if old else (new,):
                run()
            continue
        figures = {"new": graph_time(new, 10, 5), "old": graph_time(old, 10, 5) if old else 0.0}
        found[what] = figures
        print(f"{name}, {what}: {figures['new']:8.2f} us, old {figures['old']:8.2f} us", flush=True)
    for what, operations, ways in prompt_cases(name):
        if not measure:
            for run in ways.values():
                run()
            continue
        figures = {way: operations / graph_time(run, 3, 5) / 1e6 for way, run in ways.items()}
        found[f"prompts {what}"] = figures
        listed = ", ".join(f"{way} {figure:.0f}" for way, figure in figures.items())
        print(f"{name}, prompts {what}, TFLOP/s: {listed}", flush=True)
    return found


def compile_part(part: tuple[str, str]) -> None:
    kind, name = part
    if kind == "checks":
        checks(name)
    else:
        times(name, measure=False)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    both = not (args.checks or args.times)
    began = time.perf_counter()
    parts = [("checks", name) for name, _ in texts()] if args.checks or both else []
    parts += [("times", name) for name in SHAPES] if args.times or both else []
    with multiprocessing.get_context("spawn").Pool(min(len(parts), NUM_PROCESSES)) as pool:
        pool.map(compile_part, parts, chunksize=1)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, object] = {}
    if args.checks or both:
        found["checks"] = checks()
    if args.times or both:
        found["times"] = {name: times(name) for name in SHAPES}
    if args.output:
        with open(args.output, "w") as file:
            json.dump(found, file, indent=2)
    print(f"done after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
