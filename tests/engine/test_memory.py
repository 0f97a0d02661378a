"""The memory plan equals the memory that is really held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fledge.engine.build import Speculation, build_engine
from fledge.engine.memory import memory_plan
from tests.oracle import CPU, engine_with
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config


def nbytes(*tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_weights_and_cache():
    decoder, drafter = tiny_decoder(), tiny_drafter(tiny_drafter_config())
    weights, own = nbytes(*decoder.parameters()), nbytes(drafter.d2t, *drafter.parameters())  # packing keeps fp32 as it is
    engine = engine_with(decoder, Speculation(drafter), CPU)
    plan = memory_plan(engine)
    assert plan.weights == weights
    assert plan.drafter_weights == own
    caches = (engine.executor.cache, engine.drafter.cache)
    assert plan.cache == sum(nbytes(cache.keys, cache.values) for cache in caches)
    assert plan.tables == plan.rows == 0
    assert plan.total == plan.weights + plan.drafter_weights + plan.cache
    assert f"{plan.cache_tokens:,} tokens" in plan.describe()


@pytest.mark.parametrize("unrotated", [(), (1,)])
def test_the_plan_of_captured_cycles_counts_rope_tables_and_row_state(unrotated):
    """Layers without rotary positions have a table of their own."""
    engine = build_engine(tiny_decoder(unrotated=unrotated), Speculation(tiny_drafter()), CPU, capture=False)
    plan, rows = memory_plan(engine), engine.executor.batch
    assert plan.tables == nbytes(*rows.ops.rope_tables, *rows.method.ops.rope_tables)
    assert plan.rows == nbytes(rows.state.rows.tokens, rows.state.rows.stop_bits, rows.state.page_table)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packed_weights_take_half(dtype):
    config = replace(CPU, dtype=dtype)
    engine = engine_with(tiny_decoder(), Speculation("none"), config)
    linears = sum(p.numel() for name, p in tiny_decoder().named_parameters() if p.ndim == 2 and "embed" not in name)
    plan = memory_plan(engine)
    assert plan.drafter_weights == 0
    assert plan.weights > linears * (2 if dtype == "float16" else 4)
    assert plan.weights < linears * (4 if dtype == "float16" else 8)
