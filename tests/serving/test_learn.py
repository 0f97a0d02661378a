"""`fledge serve --learn` over HTTP: samples, opt-outs, metrics, report and flags."""

from __future__ import annotations

import asyncio
import time

import pytest

from fledge.errors import UserError
from fledge.learning.report import report, summarize
from fledge.serving import flags


def test_requests_are_learnt_from_unless_they_opt_out(in_process):
    learn = ["--learn", "--learn-memory", "8", "--learn-budget", "50"]

    async def main() -> None:
        async with in_process(*learn, "--api-key", "k0", "k1") as (client, service):
            client.headers["Authorization"] = "Bearer k0"
            hook = service.engine.host.loop.engine.hook
            body = {"prompt": "a b c d", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            kept_before = hook.ring.num_admitted + len(hook.ring.held_out)
            for _ in range(3):
                answer = await client.post("/v1/completions", json={**body, "learn": False})
                assert answer.status_code == 200
            assert hook.ring.num_admitted + len(hook.ring.held_out) == kept_before
            assert hook.collector.requests == 0
            callers, client_of = [], hook.collector.client
            hook.collector.client = lambda name: callers.append(name) or client_of(name)
            texts = []
            for word in "abcdefgh":
                chat = {"messages": [{"role": "user", "content": word * 3}], "max_tokens": 24, "temperature": 0}
                key = {"Authorization": f"Bearer k{len(texts) % 2}"}
                answer = await client.post("/v1/chat/completions", json={**chat, "ignore_eos": True}, headers=key)
                texts.append(answer.json()["choices"][0]["message"]["content"])
            assert len(texts) == 8
            assert hook.collector.requests == 8
            assert len(callers) == 8
            assert len(set(callers)) == 2  # shares are counted per caller
            lines = (await client.get("/metrics")).text.splitlines()
            figures = dict(line.rsplit(" ", 1) for line in lines if line.startswith("fledge:learn_"))
            labels = 'engine="0",model_name="tiny"'
            assert float(figures[f"fledge:learn_opted_out_total{{{labels}}}"]) == 3
            assert float(figures[f"fledge:learn_requests_total{{{labels}}}"]) == 8
            assert float(figures[f"fledge:learn_stopped{{{labels}}}"]) == 0
            assert f"fledge:learn_generation{{{labels}}}" in figures
            assert float(figures[f"fledge:learn_clients{{{labels}}}"]) == len(hook.ring.by_client)
            history = (await client.get("/learning")).json()
            assert history["swaps"] == []
            assert all(requests <= 8 and length >= 1 for requests, length in history["points"])

    asyncio.run(main())


def test_a_server_that_does_not_learn_has_no_history(in_process):
    async def main() -> None:
        async with in_process() as (client, _):
            answer = await client.get("/learning")
            assert answer.status_code == 404
            assert "--learn" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_texts_expire_while_the_server_is_idle(in_process):
    async def main() -> None:
        async with in_process("--learn", "--learn-memory", "8", "--learn-max-age", "0.001") as (client, service):
            hook = service.engine.host.loop.engine.hook
            for word in "abcd":
                body = {"prompt": word * 3, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                await client.post("/v1/completions", json=body)
            assert hook.ring.num_admitted
            deadline = time.monotonic() + 30
            while hook.ring.kept:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)

    asyncio.run(main())


def test_learning_flags_require_learn():
    with pytest.raises(UserError, match="add --learn"):
        flags.parse(["m", "--learn-budget", "3"])
    with pytest.raises(UserError, match="percentage"):
        flags.parse(["m", "--learn", "--learn-budget", "0"])
    assert flags.parse(["m"]).learn is None
    learn = flags.parse(["m", "--learn", "--learn-max-age", "2"]).learn
    assert learn.budget == 5
    assert learn.max_age == 7200


def test_the_report_draws_the_curve(tmp_path):
    lines = [
        '{"event": "point", "requests": 32, "steps": 0, "acceptance_length": 1.5}',
        '{"event": "swap", "requests": 40, "generation": 1, "recent_before": 1.5, "recent_after": 2.0, "fixed_before": 3.0, "fixed_after": 3.1}',  # noqa: E501
        '{"event": "point", "requests": 64, "steps": 16, "acceptance_length": 2.1}',
        '{"event": "rollback", "requests": 90, "generation": 0, "reason": "live acceptance has fallen"}',
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(lines) + "\n")
    events, told = report(tmp_path)
    assert [event["event"] for event in events].count("swap") == 1
    assert "1.50 at first, 2.10 now" in told
    assert "at 40 requests generation 1: held-out traffic 1.50 → 2.00, fixed set 3.00 → 3.10" in told
    assert "back to generation 0" in told
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="no point"):
        summarize([])
    with pytest.raises(UserError, match="learn-dir"):
        report(tmp_path / "nowhere")
