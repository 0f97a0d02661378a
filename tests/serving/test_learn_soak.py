"""A soak test of `--learn`: 16 clients on a toy model while weights are swapped. `make soak-learn` runs it for 30 minutes.

FLEDGE_LEARN_SOAK_SECONDS: the duration; without it the test is skipped. FLEDGE_LEARN_SOAK_REPORT: a file for the figures.
FLEDGE_LEARN_SOAK_MODEL: the folder of an existing toy target (`fledge.training.targets.toy.make`).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from fledge.bench.provenance import provenance, write_json
from fledge.training.targets import toy
from tests.serving.processes import ServerProcess
from tests.serving.soak import figures_of, process_tree

SECONDS = float(os.environ.get("FLEDGE_LEARN_SOAK_SECONDS", "0"))
MODEL = os.environ.get("FLEDGE_LEARN_SOAK_MODEL")
REPORT = os.environ.get("FLEDGE_LEARN_SOAK_REPORT")
CLIENTS = 16
KEYS = [f"key-{number}" for number in range(4)]  # the server identifies callers by their keys
LEARN = ["--learn", "--learn-budget", "40", "--learn-memory", "16", "--api-key", *KEYS]
FLAGS = ["--served-model-name", "toy", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "16", "--max-model-len", "256"]
# Allowed from 10 % of the run to its end, for the growth of the allocator and the interpreter.
MAX_GROWTH_MIB = 64


def question(chance: random.Random, part: float) -> str:
    """A random prompt. `part`: fraction of the run: traffic shifts from stories to counting and then to spelling."""
    kind = ["tell", "count", "spell"][min(2, int(3 * part))] if chance.random() < 0.8 else "tell"
    while True:
        prompt, _ = toy.conversation(chance)
        words = [toy.WORDS[token] for token in prompt[1:-1]]
        if words[0] == kind:
            return " ".join(words)


def settled(server: ServerProcess) -> dict[str, int]:
    """The server's figures, after a wait for it to close the clients' connections."""
    time.sleep(3)
    return figures_of(process_tree(server.process.pid))


def bearer(seed: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[seed % len(KEYS)]}"}


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=60, headers=bearer(0)).text.splitlines()
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


async def load(url: str, seconds: float, whole: float, elapsed: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    began = time.monotonic()

    async def user(seed: int) -> None:
        chance = random.Random(f"{seed} {elapsed}")
        while (passed := time.monotonic() - began) < seconds:
            body = {"messages": [{"role": "user", "content": question(chance, (elapsed + passed) / whole)}]}
            body |= {"max_tokens": 64, "temperature": 0, "learn": chance.random() < 0.9}
            response = await client.post("/v1/chat/completions", json=body, headers=bearer(seed))
            seen[str(response.status_code)] += 1

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(user(seed) for seed in range(CLIENTS)))
    return seen


@pytest.mark.skipif(not SECONDS, reason="set FLEDGE_LEARN_SOAK_SECONDS")
def test_swaps_under_load(tmp_path: Path) -> None:
    model = MODEL or str(toy.make(tmp_path / "toy", num_answers=1) / "target")
    arguments = [model, *FLAGS, *LEARN, "--learn-dir", str(tmp_path / "learnt")]
    with ServerProcess([*arguments, "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]) as server:
        warm = SECONDS / 10
        seen = asyncio.run(load(server.url, warm, SECONDS, 0.0))
        before = settled(server)  # all processes: learning runs in the engine's
        seen += asyncio.run(load(server.url, SECONDS - warm, SECONDS, warm))
        after, found = settled(server), metrics(server.url)
        grown = after["memory_mib"] - before["memory_mib"]
        figures = {
            "clients": CLIENTS,
            "seconds": SECONDS,
            "outcomes": dict(seen),
            "memory_mib": before["memory_mib"],
            "memory_growth_mib": grown,
            "share_of_time": found["fledge:learn_learning_seconds_total"] / found["fledge:learn_serving_seconds_total"],
            **{name: value for name, value in found.items() if name.startswith("fledge:learn_")},
            "acceptance_length": found["fledge:acceptance_length"],
        }
        if REPORT:
            write_json(REPORT, {"provenance": provenance(), **figures})
        print(figures)
        assert set(seen) == {"200"}, seen
        assert found["fledge:learn_swaps_total"] >= 1, figures
        assert found["fledge:learn_stopped"] == 0
        assert found["fledge:learn_clients"] == len(KEYS)
        assert figures["share_of_time"] < 0.42
        assert grown < MAX_GROWTH_MIB, figures
        assert after["descriptors"] <= before["descriptors"] + 8
    assert (tmp_path / "learnt" / "current.json").is_file()
