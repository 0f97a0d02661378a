"""Samples, budget, gate, generations and other parts of learning, each tested alone."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from fledge.drift.metrics import Count
from fledge.drift.texts import TargetText
from fledge.engine.kv_pool import PageKeys, PagePool
from fledge.errors import UserError
from fledge.learning.candidate import pack
from fledge.learning.collector import RETIRE_AFTER, Admission, Domains
from fledge.learning.config import LearnConfig
from fledge.learning.fixed_set import BUILT_IN, FixedSet
from fledge.learning.gate import MAX_CLIENTS, Decision, Live, has_fallen, judge
from fledge.learning.generations import Generations, read_history
from fledge.learning.journal import Journal
from fledge.learning.micro_steps import FREE_SECONDS, MOST_CREDIT, Budget
from fledge.learning.report import summarize
from fledge.learning.samples import MAX_USES, Sample, SampleRing, is_held_out
from fledge.speculation.guard import DriftGuard
from fledge.speculation.stats import AcceptanceStats


def texts(count: int, client: str, seed: int, length: int = 40) -> list[Sample]:
    """Different samples that are not held out."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        tokens = [draw.randrange(1000) for _ in range(length)]
        if not is_held_out(tokens[:10]):
            found.append(Sample(tokens, 10, client))
    return found


def test_ring_is_bounded_and_clients_get_fair_shares():
    ring = SampleRing(5340, 8, seed=0)  # 3/4 of the tokens are for training
    for sample in texts(20, "quiet", 1):
        ring.admit(sample)
    for sample in texts(500, "flood", 2):
        ring.admit(sample)
    assert 3800 < ring.num_tokens <= 4005
    assert len(ring.by_client["quiet"]) == 20  # 800 tokens, below its share: nothing was displaced
    drawn = [one.client for _ in range(40) for one in ring.draw(200)]
    assert 0.3 < drawn.count("flood") / len(drawn) < 0.7


def test_loops_are_not_learnt():
    ring = SampleRing(4000, 8)
    sample = texts(1, "", 3)[0]
    sample.tokens = sample.tokens[:10] + [5, 6, 7] * 40
    assert not ring.admit(sample)
    partly = texts(1, "", 4)[0]
    partly.tokens += [5, 6, 7] * 40
    assert ring.admit(partly)
    assert len(partly.tokens) <= 46
    assert ring.dropped["loop"] == 1


def test_high_priority_samples_are_kept_and_drawn_first():
    ring = SampleRing(2000, 8, seed=0)
    for number, sample in enumerate(texts(100, "", 5)):
        sample.priority = 1.0 if number % 4 == 0 else 0.1
        ring.admit(sample)
    kept = ring.by_client[""]
    assert sum(one.priority == 1.0 for one in kept) > 0.4 * len(kept)
    assert sum(one.priority == 1.0 for one in ring.draw(200)) >= 4


def test_sample_uses_and_age_are_limited():
    now = [0.0]
    ring = SampleRing(4000, 8, max_age=60, clock=lambda: now[0])
    for sample in texts(2, "", 6):
        sample.arrival = 0.0
        ring.admit(sample)
    assert sum(len(ring.draw(400)) for _ in range(100)) == 2 * MAX_USES
    assert ring.expires_at == 60.0
    now[0] = 59.0
    ring.expire()
    assert len(ring) == 2
    now[0] = 61.0
    ring.expire()
    assert len(ring) == 0
    assert ring.expires_at == math.inf


def test_a_held_out_prompt_is_never_trained_on():
    ring = SampleRing(10**6, 64)
    draw = random.Random(7)
    prompts = [[draw.randrange(1000) for _ in range(10)] for _ in range(400)]
    for _ in range(2):  # the stream repeats its prompts
        for prompt in prompts:
            ring.admit(Sample(prompt + [draw.randrange(1000) for _ in range(30)], 10))
    trained = {tuple(one.tokens[:10]) for one in ring.by_client[""]}
    assert not trained & {tuple(one.tokens[:10]) for one in ring.held_out}
    assert 0.06 < 1 - len(trained) / 400 < 0.2
    assert len(ring.held_out) == 64


def held_out(count: int, client: str, prompt: int, answer: int, seed: int = 8) -> list[Sample]:
    draw, found = random.Random(seed), []
    while len(found) < count:
        tokens = [draw.randrange(1000) for _ in range(prompt + answer)]
        if is_held_out(tokens[:prompt]):
            found.append(Sample(tokens, prompt, client))
    return found


@pytest.mark.parametrize("prompt", [20, 700])
def test_long_texts_are_shortened_to_keep_enough_held_out_texts(prompt):
    ring = SampleRing(1600, 32, min_held_out=4)  # 400 tokens for held-out texts, 100 for each
    for number, sample in enumerate(held_out(12, "", prompt, 300), 1):
        whole = list(sample.tokens)
        assert ring.admit(sample)
        assert len(ring.held_out) == min(number, 4)
        tokens_T = torch.tensor(sample.tokens)
        sample.keep(TargetText(tokens_T, prompt, [tokens_T[:, None].float()], tokens_T[:, None].float()))
        text = sample.text
        assert len(text.tokens_T) == len(text.taps[0]) == sample.num_states == 100
        assert text.taps[0].untyped_storage().nbytes() == 400  # not a view of the whole
        assert sample.tokens == text.tokens_T.tolist() == text.taps[0][:, 0].tolist() == [whole[0], *whole[-99:]]
        assert sample.num_skipped == len(whole) - 100
        assert text.tokens_T[text.answer_start :].tolist() == whole[-99:]  # only tokens of the answer are kept
        ring.check_integrity()


def test_a_long_text_keeps_its_first_token_and_its_end_at_their_positions():
    """If the prompt is longer than a sample, the answer is still learnt from."""
    ring = SampleRing(1600, 32, sample_tokens=64)
    sample = next(one for one in texts(1, "", 4, length=200))
    sample.answer_start = 170
    whole = list(sample.tokens)
    if is_held_out(whole[:170]):
        whole[0] = sample.tokens[0] = whole[0] + 1
    assert ring.admit(sample)
    ring.check_integrity()
    states = torch.arange(200.0)[:, None]
    sample.keep(TargetText(torch.tensor(whole), 170, [states], states))
    ring.check_integrity()
    assert ring.num_tokens == 64
    assert sample.tokens == [whole[0], *whole[-63:]]
    packed, packed_states = pack([sample], 80)
    assert packed.positions[0, :64].tolist() == [0, *range(137, 200)]
    assert packed_states.taps[0][:64, 0].tolist() == packed_states.hidden_ND[:64, 0].tolist() == [0, *range(137, 200)]
    assert packed.loss_mask[0].sum() == 30
    assert packed.loss_mask[0, 34:64].all()


def test_held_out_tokens_are_shared_between_clients():
    ring = SampleRing(1600, 16)  # 400 tokens for held-out texts
    for sample in held_out(6, "short", 10, 10):
        ring.admit(sample)
    for sample in held_out(20, "long", 10, 90):
        ring.admit(sample)
    assert sum(one.client == "short" for one in ring.held_out) == 6  # 120 tokens
    assert sum(one.client == "long" for one in ring.held_out) == 2
    for sample in held_out(40, "flood", 10, 10, seed=9):
        ring.admit(sample)
    assert len(ring.held_out) <= 16
    assert {one.client for one in ring.held_out} == {"short", "long", "flood"}
    assert ring.admit(held_out(1, "", 10, 5000, seed=10)[0])  # a text longer than the whole ring
    assert sum(one.num_states for one in ring.held_out) <= 400


def test_budget_is_respected():
    now = [0.0]
    budget = Budget(5.0, lambda: now[0])
    budget.serve()
    for step in range(20_000):
        now[0] += 0.002
        budget.serve()
        if budget.credit > 0:
            cost = 0.03 if step % 3 else 0.3
            now[0] += cost
            budget.charge(cost)
    spent = budget.spent
    assert 0.045 < spent.learning / spent.serving < 0.055
    budget.rest()
    now[0] += 3600  # an idle hour earns no credit
    budget.charge(10)
    budget.serve()
    assert spent.idle == 10
    assert budget.credit <= MOST_CREDIT
    assert spent.serving < 100


def counts(accepted: float, number: int = 24, seed: int = 0) -> list[Count]:
    """Texts of 40 steps that accept about `accepted` tokens per step."""
    draw = random.Random(seed)
    return [Count(40 * accepted + draw.randrange(-4, 5), 40) for _ in range(number)]


def test_gate_requires_clear_gain_and_no_loss():
    config = LearnConfig()
    domains = [0] * 12 + [1] * 12
    assert judge(config, counts(1.0), counts(1.4), domains).accepted
    assert "noise" in judge(config, counts(1.0), counts(1.0, seed=1), domains).reason
    # Better overall, but worse in one domain.
    mixed = counts(2.0)[:12] + counts(0.8)[:12]
    assert "domain 1" in judge(config, counts(1.0), mixed, domains).reason
    assert "fixed set" in judge(config, counts(1.0), counts(1.4), domains, counts(2.0), counts(1.9)).reason
    assert judge(config, counts(1.0), counts(1.4), domains, counts(2.0), counts(2.01)).accepted


def test_gate_refuses_a_gain_of_only_one_client():
    before, after = counts(1.0, 24), counts(1.6, 18) + counts(0.7, 6, seed=1)
    clients = ["flood"] * 18 + ["a", "b"] * 3
    assert judge(LearnConfig(), before, after, [0] * 24).accepted
    decision = judge(LearnConfig(), before, after, [0] * 24, clients=clients)
    assert not decision.accepted
    assert "all but one client" in decision.reason
    assert judge(LearnConfig(), before, counts(1.4), [0] * 24, clients=clients).accepted


def test_a_refused_candidate_is_worse_only_beyond_noise():
    domains = [0] * 24
    assert not judge(LearnConfig(), counts(1.0), counts(1.0), domains).is_worse
    assert judge(LearnConfig(), counts(1.0), counts(0.9, seed=1), domains).is_worse
    assert judge(LearnConfig(), counts(1.0), counts(1.4), domains, counts(2.0), counts(1.9)).is_worse


def test_noise_on_the_fixed_set_refuses_no_candidate():
    """A candidate without a real change: noise in few texts of the fixed set must not refuse it."""
    config, domains, draw = LearnConfig(), [0] * 24, random.Random(0)

    def decisions(change: float, number: int) -> list[Decision]:
        found = []
        for _ in range(200):
            before = [Count(40 * draw.uniform(0.8, 3), 40) for _ in range(number)]
            after = [Count(((1 + c.accepted / 40) * (1 + change + draw.gauss(0, 0.045)) - 1) * 40, 40) for c in before]
            found.append(judge(config, counts(1.0), counts(1.4), domains, before, after))
        return found

    for number in (12, 48):
        assert sum(one.accepted for one in decisions(0.0, number)) > 180
        assert sum(one.is_worse for one in decisions(0.0, number)) <= 2
        assert sum(one.is_worse for one in decisions(-0.015, number)) < 12  # training continues from it
    assert sum(one.accepted for one in decisions(-0.03, 128)) < 2
    assert sum(one.is_worse for one in decisions(-0.03, 128)) > 150
    clear = judge(config, counts(1.0), counts(1.4), domains, counts(2.0), counts(1.7))
    assert clear.is_worse


def test_the_fixed_set_compares_with_the_better_of_first_and_serving():
    """On day 0 the first generation accepts almost nothing, so it is no useful baseline alone."""
    samples = texts(4, "", 1)
    fixed = FixedSet.of(samples)
    assert fixed.baseline(0) == []
    fixed.counts = {0: dict.fromkeys(fixed.judged, Count(3, 40))}
    assert fixed.baseline(0) == [Count(3, 40)] * 2
    fixed.keep(dict.fromkeys(fixed.judged, Count(60, 40)), 1)
    assert fixed.baseline(1) == [Count(60, 40)] * 2
    fixed.keep(dict.fromkeys(fixed.judged, Count(50, 40)), 2)
    assert fixed.baseline(2) == [Count(50, 40)] * 2
    assert set(fixed.counts) == {0, 2}
    fixed.keep(dict.fromkeys(fixed.judged, Count(1, 40)), 3)
    assert fixed.baseline(3) == [Count(3, 40)] * 2


def test_the_built_in_fixed_set_is_large_and_diverse():
    prompts = BUILT_IN.read_text(encoding="utf-8").splitlines()
    assert len(set(prompts)) == len(prompts) >= 256
    assert all(15 <= len(one) <= 160 for one in prompts)
    assert len({one.split()[0] for one in prompts}) > 25


def test_a_single_text_is_no_evidence():
    assert not judge(LearnConfig(), counts(1.0, 1), counts(3.0, 1), [0]).accepted


def live(rate: float, requests: int, domain: int = 0, client: str = "a", beside: Live | None = None) -> Live:
    draw, found = random.Random(0), beside or Live()
    for _ in range(requests):
        found.add(domain, client, 100, 3 * 100, int(100 * rate) + draw.randrange(-5, 6))
    return found


def test_fall_is_detected_only_within_domains():
    assert has_fallen(live(0.7, 50), live(0.5, 50))
    assert not has_fallen(live(0.7, 50), live(0.5, 8))  # too few requests
    assert not has_fallen(live(0.7, 50), live(0.69, 50))
    assert not has_fallen(live(0.7, 50, domain=0), live(0.3, 50, domain=1))  # another domain


@pytest.mark.parametrize(("before", "after"), [(1, 5), (5, 1)])
def test_change_of_depth_is_no_fall(before, after):
    """The depth depends on the load, and later positions have lower acceptance."""
    draw, rates = random.Random(0), [0.8, 0.7, 0.6, 0.5, 0.4]

    def served(depth: int) -> Live:
        found = Live()
        for number in range(300):
            stats = AcceptanceStats()
            for _ in range(40):
                accepted = next((at for at in range(depth) if draw.random() > rates[at]), depth)
                stats.add_step(depth, depth, accepted, accepted + 1)
            found.add(0, "abcd"[number % 4], stats.steps, stats.accepted, stats.accepted_at[0])
        return found

    assert not has_fallen(served(before), served(after))


def test_one_client_cannot_cause_a_roll_back():
    before = live(0.7, 50, beside=live(0.7, 10, client="b"))
    assert not has_fallen(before, live(0.3, 200, beside=live(0.7, 10, client="b")))  # one client's traffic gets harder
    assert not has_fallen(live(0.9, 50, beside=live(0.4, 10, client="b")), live(0.4, 30, client="b"))  # an easy client left
    assert has_fallen(before, live(0.3, 50, beside=live(0.3, 10, client="b")))  # all clients fell
    assert has_fallen(live(0.7, 50), live(0.3, 50, beside=live(0.9, 2, client="b")))  # two requests are no evidence
    many = Live()
    for number in range(500):
        live(0.5, 1, client=str(number), beside=many)
    assert len(many.by_client) == MAX_CLIENTS + 1
    assert many.requests == 500


def test_flood_does_not_block_other_clients():
    now = [0.0]
    admission = Admission(30, lambda: now[0])
    for _ in range(10_000):  # ten seconds of only the flood
        now[0] += 0.001
        admission.admits("flood")
    counts = {"flood": 0, "a": 0, "b": 0}
    for step in range(10_000):
        now[0] += 0.001
        counts["flood"] += admission.admits("flood")
        if step % 200 == 0:
            counts["a"] += admission.admits("a")
        if step % 500 == 100:
            counts["b"] += admission.admits("b")
    assert counts["a"] == 50
    assert counts["b"] == 20
    assert 200 < counts["flood"] <= 300 - 70 + 8
    assert admission.is_over_share("flood")
    assert not admission.is_over_share("a")


def test_one_client_alone_has_the_whole_rate():
    now = [0.0]
    admission = Admission(30, lambda: now[0])
    assert 300 <= sum(admission.admits("only") for now[0] in [n / 1000 for n in range(10_000)]) <= 340
    assert not admission.is_over_share("only")


def test_unused_cluster_is_replaced():
    domains, draw = Domains(max_clusters=2), random.Random(0)

    def text(kind: int) -> list[int]:
        return [5000 * kind + draw.randrange(100) for _ in range(80)]

    assert [domains.assign(text(kind))[0] for kind in (0, 1)] == [0, 1]
    for kind in range(2, 10):  # a single new text replaces no cluster
        domains.assign(text(0))
        assert domains.assign(text(kind))[0] in (0, 1)
    while domains.ids == [0, 1]:
        domains.assign(text(0))
        domains.assign(text(11))
        assert domains.num_texts < 2 * RETIRE_AFTER
    assert domains.ids == [0, 2]
    assert domains.assign(text(0))[0] == 0
    assert domains.assign(text(11))[0] == 2


def test_domains_separate_different_vocabularies():
    domains, draw = Domains(), random.Random(0)
    first = [domains.assign([draw.randrange(100) for _ in range(80)])[0] for _ in range(10)]
    second = [domains.assign([5000 + draw.randrange(100) for _ in range(80)]) for _ in range(10)]
    assert len(set(first)) == 1
    assert len({one for one, _ in second}) == 1
    assert second[0][0] != first[0]
    assert second[0][1] == 1.0
    assert second[-1][1] < 0.5


def test_figures_of_retired_domains_are_dropped(learning_engine):
    hook = learning_engine(budget=1e-6, samples_per_second=1e9).hook
    draw, seen = random.Random(0), set()

    class Served(SimpleNamespace):
        __hash__ = object.__hash__

    for number in range(5000):  # each text has its own words
        tokens = draw.choices([draw.randrange(10**6) for _ in range(30)], k=60)
        stats = SimpleNamespace(steps=10, accepted=5, accepted_at=[5], drafted_at=[10])
        served = Served(id=str(number), learn=True, finish_reason="stop", num_answer=40, client=str(number % 5), stats=stats)
        served.tokens, served.prompt = tokens, tokens[:20]
        hook.collector.take_in([served])
        seen |= hook.served.live.by_domain.keys()
    assert len(seen) > 50
    assert hook.served.live.requests == 5000
    for figures in (hook.served.live.by_domain, hook.collector.lengths_before, *hook.served.live.by_client.values()):
        assert 0 < len(figures) <= hook.collector.domains.max_clusters
    assert len(hook.served.live.by_client) == 5
    assert all(one["before"] and one["after"] for one in hook.stats()["domains"].values())


def test_history_ignores_an_incomplete_line(tmp_path):
    generations = Generations(tmp_path, keep=2)
    assert generations.current is None
    generations.record({"event": "point", "requests": 1})
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"event": "poi')
    assert [event["requests"] for event in read_history(tmp_path)] == [1]
    (tmp_path / "current.json").write_text('{"generation": 7}')
    with pytest.raises(UserError, match="generation-0007"):
        _ = generations.current


def test_a_learn_folder_with_strange_files(tmp_path):
    history = tmp_path / "history.jsonl"
    history.write_text('5\n{"event": "point", "requests": 1}\n["event"]\n')
    assert [event["requests"] for event in read_history(tmp_path)] == [1]
    history.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"history\.jsonl: cannot be read"):
        read_history(tmp_path)
    (tmp_path / ".lock").mkdir()  # makes the lock file impossible to write
    with pytest.raises(UserError, match=r"--learn-dir .*: cannot be written .*give another folder"):
        Generations(tmp_path, keep=2).lock()


def test_restart_continues_counts_after_an_incomplete_line(tmp_path):
    own = {"requests": 32, "generation": 1, "steps": 16}
    for _ in range(3):
        journal = Journal(Generations(tmp_path, keep=2).lock(), lambda: own)
        journal.record("point", acceptance_length=2.0)
        journal.record("swap", generation=5)
        journal.close()
        with (tmp_path / "history.jsonl").open("a") as file:
            file.write('{"event": "poi')  # as after a kill
    events = read_history(tmp_path)
    assert [event["requests"] for event in events] == [32, 32, 64, 64, 96, 96]
    assert [event["steps"] for event in events] == [16, 16, 32, 32, 48, 48]
    assert [event["generation"] for event in events] == [1, 5] * 3
    # The page shows the points from before the restart, and one point for the time since.
    journal = Journal(Generations(tmp_path, keep=2).lock(), lambda: {**own, "requests": 4})
    journal.add_request(steps=10, accepted=15)
    assert journal.history() == {"points": [[32, 2.0], [64, 2.0], [96, 2.0], [100, 2.5]], "swaps": [32, 64, 96]}
    journal.close()
    seconds = [event["seconds"] for event in events]
    assert seconds == sorted(seconds)
    assert "96 requests, 48 training steps" in summarize([{"recent_before": 1, "recent_after": 2} | event for event in events])


def test_pool_forget_keeps_pages_in_use():
    pool = PagePool(8, 4)
    tokens = list(range(13))
    first: list[int] = []
    keys = PageKeys(tokens, 4, drafted=True)
    pool.grow(first, 13)
    pool.share(first, keys, 13)
    second: list[int] = []
    again = PageKeys(list(tokens), 4, drafted=True)
    pool.take(second, pool.find(again), again)
    pool.check_integrity([first, second])
    pool.forget()
    pool.check_integrity([first, second])
    assert not pool.find(PageKeys(list(tokens), 4, drafted=True))
    pool.release(first)
    pool.check_integrity([second])
    pool.release(second)
    pool.check_integrity([])
    assert pool.num_free == 8


def test_renewed_guard_restores_full_depth():
    guard = DriftGuard(4, calibration_steps=0)
    for step in range(400):
        guard.record("good", 4, 4)
        if step > 100:
            guard.record("bad", 4, 0)
    assert guard.depth("bad") < 4
    assert guard.counts.shortened == 1
    guard.renew()
    assert guard.depth("bad") == 4
    assert guard.counts.shortened == 0


def test_collecting_uses_a_fifth_of_the_budget():
    now = 0.0
    budget = Budget(5, clock=lambda: now)
    budget.serve()
    spent = 0.0
    for _ in range(10_000):  # 100 s of serving; every 10 ms there is a sample that takes 10 ms
        now += 0.01
        budget.serve()
        if budget.allows_collecting():
            budget.charge(0.01, collecting=True)
            spent += 0.01
    assert FREE_SECONDS <= spent <= FREE_SECONDS + 0.01 * now + 0.02  # a fifth of 5 %
    assert budget.spent.collecting == pytest.approx(spent)
