"""Learning beside `Engine.step`: collects what finished requests showed, trains in the gaps, swaps weights between two steps.

    before_step   a piece of training, if the budget allows; an accepted candidate is copied in here
    after_step    samples and live acceptance of the requests that finished; cheap
    idle          a piece of training, while nothing runs

What goes wrong here ends learning, with a line in the log; serving goes on.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fledge.engine.engine import Engine
from fledge.engine.memory import readable
from fledge.engine.request import Delta, Request
from fledge.learning.budget import Budget
from fledge.learning.config import LearnConfig
from fledge.learning.domains import Domains
from fledge.learning.gate import LEAST_REQUESTS, Decision, Live, has_fallen
from fledge.learning.generations import Generations
from fledge.learning.learner import FixedSet, Learner
from fledge.learning.samples import LEAST_ANSWER, Sample, SampleRing
from fledge.learning.target import ServedTarget
from fledge.learning.weights import StagedWeights
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.speculation.drafting import EagleSpeculator

log = logging.getLogger("fledge.learning")

CURVE_REQUESTS = 32  # requests that were looked at, to a point of the curve
CURVE_POINTS = 512  # kept for the page
# While pieces of work take longer, they wait until nothing runs, or for a minute. A training step takes a tenth of a second on
# a GPU, seconds on a small CPU, where every request would stop meanwhile.
MAX_PAUSE, LONG_PIECE_EVERY = 0.5, 60.0
EXPIRE_EVERY = 60.0  # seconds between two looks for samples that are too old
NOVEL_NEED, SHORTENED_NEED = 0.5, 1.0  # added to a sample's need
PROMPT_TOKENS = 64  # of a prompt's end, that its domain is told by beside the answer


class Learning:
    """The engine's hook. One for each engine; only the engine's thread calls it, other threads may read `stats`."""

    def __init__(
        self,
        engine: Engine,
        master: EagleDrafter,
        config: LearnConfig,
        fixed_prompts: Sequence[Sequence[int]] = (),
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`master`: the served drafter in fp32, not packed. `config` must be resolved. `fixed_prompts`: of the fixed set."""
        assert isinstance(engine.drafter, EagleSpeculator)
        self.engine, self.config, self.clock = engine, config, clock
        self.network, self.fixed_prompts = engine.drafter.network, fixed_prompts
        self.target = ServedTarget(engine.decoder, master.config.aux_layer_ids)
        max_tokens = config.memory_mb * 2**20 // self.target.bytes_per_token()
        self.ring = SampleRing(max_tokens, config.held_out_texts, max_age=config.max_age, seed=config.seed)
        depth = max(1, engine.controller.limit)
        self.learner = Learner(
            master, self.target, self.ring, FixedSet(), config, depth=depth, swap=self._swap, refused=self._refused
        )
        self.budget = Budget(config.budget, clock)
        self.domains = Domains()
        self.live = Live()  # of the generation that is served
        self.before: tuple[dict[str, Tensor], int, Live] | None = None  # weights, number and acceptance of the one before
        self.first: dict[int, float] = {}  # acceptance length by domain, before anything was learnt
        self.counts = {"swaps": 0, "rollbacks": 0, "opted_out": 0, "skipped": 0}
        self.requests = self.fixed_tokens = 0
        self.curve: deque[dict[str, Any]] = deque(maxlen=CURVE_POINTS)
        self.events: deque[dict[str, Any]] = deque(maxlen=CURVE_POINTS)
        self.generations = Generations(config.folder, config.keep_generations) if config.folder is not None else None
        self.stopped: str | None = None  # why nothing is learnt any more
        self._pieces = self.learner.pieces()
        self._has_work = True
        self._piece_seconds, self._worked_at = 0.0, clock()  # of the longest of the last pieces, about; when the last ended
        self._shortened: set[str] = set()  # ids of running requests that the drift guard shortened
        self._admission = config.samples_per_second  # samples that may be taken in now
        self._admitted_at = self._expired_at = clock()
        self._window = [0, 0, 0]  # steps, accepted tokens and requests of the next point of the curve
        self._salt = secrets.token_bytes(16)  # clients are told apart by a hash that means nothing elsewhere
        self._disk = ThreadPoolExecutor(1, "learn-disk")
        self._began = time.time()
        engine.executor.collect_states(limit=min(config.sample_tokens, engine.config.max_model_len))
        engine.hook = self

    # The engine's hook

    def before_step(self) -> None:
        self.budget.serve()
        is_short = self._piece_seconds <= MAX_PAUSE or self.clock() - self._worked_at > LONG_PIECE_EVERY
        if self.budget.allows and is_short:
            self._work()

    def after_step(self, deltas: Sequence[Delta]) -> None:
        if self.stopped is not None:
            return
        guard = self.engine.controller.guard
        if guard is not None and guard.counts.shortened:
            self._shortened &= self.engine.requests.keys() | {d.request.id for d in deltas}  # not of those that were aborted
            self._shortened |= {d.request.id for d in deltas if guard.depth(d.request) < guard.limit}
        finished = [delta.request for delta in deltas if delta.finished]
        if finished:
            began = self.clock()
            self._guarded(lambda: self._take_in(finished))
            self.budget.charge(self.clock() - began, collecting=True)
        if not self.engine.has_unfinished():
            self.budget.rest()

    def idle(self) -> bool:
        """A piece of work; False: there is none until more requests were served."""
        if self.budget.is_serving:
            self.budget.rest()
        return self._work()

    def warm_up(self) -> list[str]:
        """Answers the prompts of the fixed set, and makes one training step on nothing: a GPU compiles it."""
        lines = []
        if self.fixed_prompts:
            texts = answer(self.engine, self.fixed_prompts, self.config.fixed_tokens)
            self.learner.fixed = FixedSet.of(texts)
            self.fixed_tokens = sum(len(one.tokens) for one in texts)
            lines.append(f"learning: fixed set of {len(texts)} answers, half of them replayed, half for the gate")
        self.learner.warm_up()
        return [*lines, self.describe()]

    def describe(self) -> str:
        """What is kept, where and for how long: said at the start."""
        config = self.config
        where = f"generations are kept in {config.folder}" if config.folder is not None else "nothing is written to disk"
        return (
            f"learning from requests: up to {config.memory_mb} MiB of their tokens and hidden states stay in memory, for "
            f'{config.max_age / 3600:g} hours at most; {where}; nothing leaves this machine; a request with "learn": false is '
            f"not kept. Budget {config.budget:g} % of the time; memory {readable(self.num_bytes)} in all"
        )

    def close(self) -> None:
        """Waits for what is being written."""
        self._disk.shutdown()

    # Work

    def _work(self) -> bool:
        if self.stopped is not None or not self._has_work:
            return False
        began = self.clock()
        self._guarded(self._piece)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)  # what it takes is to be measured
        self.engine.executor.interrupted()
        seconds = self.clock() - began
        self._piece_seconds, self._worked_at = max(seconds, 0.9 * self._piece_seconds), self.clock()
        self.budget.charge(seconds)
        return self._has_work and self.stopped is None

    def _piece(self) -> None:
        # `False`: nothing to do until samples come; not asked again before.
        self._has_work = next(self._pieces)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (torch.OutOfMemoryError, MemoryError):
            self._stop("out of memory")
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                log.exception("learning failed")
            self._stop("out of memory" if "can't allocate memory" in str(error) else "it failed; see above")
        except Exception:
            log.exception("learning failed")
            self._stop("it failed; see above")

    def _stop(self, reason: str) -> None:
        """Gives up what learning holds. The generation that is served stays."""
        self.stopped = reason
        log.error("learning stops: %s; serving goes on with generation %d", reason, self.learner.generation)
        self.ring.forget_all()
        self.before = None
        self._pieces = iter(())
        self.engine.executor.collect_states(limit=0)
        self.learner.release()
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    # Collecting

    def _take_in(self, requests: Sequence[Request]) -> None:
        for request in requests:
            shortened = request.id in self._shortened
            self._shortened.discard(request.id)
            if not request.learn:
                self.counts["opted_out"] += 1
                continue
            if request.finish_reason not in ("stop", "length") or not request.num_answer:
                continue
            self.requests += 1
            if not self._may_admit():  # at thousands of tokens a second, looking at each request would take the budget
                self.counts["skipped"] += 1
                continue
            tokens, start = request.tokens[: self.config.sample_tokens], len(request.prompt)
            domain, novelty = self.domains.assign([*request.prompt[-PROMPT_TOKENS:], *tokens[start:]])
            rejected = self._note_live(request, domain)
            if not self.budget.allows_collecting:
                self.counts["skipped"] += 1
                continue
            need = rejected + NOVEL_NEED * novelty + SHORTENED_NEED * shortened
            sample = Sample(list(tokens), start, self._client(request.client), domain, need)
            if not self.ring.admit(sample):
                continue
            self._has_work = True
            if (states := self.engine.executor.take_states(request)) is not None:
                sample.text = self.target.collected(sample.tokens, start, *states)
        self._check_live()
        if self.clock() - self._expired_at > EXPIRE_EVERY:
            self._expired_at = self.clock()
            self.ring.expire()

    def _may_admit(self) -> bool:
        now, rate = self.clock(), self.config.samples_per_second
        self._admission = min(self._admission + rate * (now - self._admitted_at), rate)
        self._admitted_at = now
        if self._admission < 1:
            return False
        self._admission -= 1
        return True

    def _client(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), key=self._salt, digest_size=8).hexdigest()

    def _note_live(self, request: Request, domain: int) -> float:
        """Adds a request's acceptance to the live figures; the share of its drafts that was rejected."""
        stats = request.stats
        if not stats.steps:
            return 0.5
        deeper = zip(stats.accepted_at, stats.drafted_at[1:], strict=False)
        tried = stats.steps + sum(min(reached, drafted) for reached, drafted in deeper)
        self.live.add(domain, stats.steps, stats.accepted, tried)
        if not self.counts["swaps"] and (length := self.live.length_of(domain)) is not None:
            self.first[domain] = length
        window = self._window
        window[0] += stats.steps
        window[1] += stats.accepted
        window[2] += 1
        if window[2] >= CURVE_REQUESTS:
            self._window = [0, 0, 0]
            self._record("point", self.curve, acceptance_length=1 + window[1] / window[0])
        return 1 - stats.accepted / tried

    def _check_live(self) -> None:
        if self.before is not None and has_fallen(self.before[2], self.live):
            self.roll_back("live acceptance has fallen")

    # Swaps

    def _swap(self, weights: dict[str, Tensor], decision: Decision) -> Iterator[None]:
        staged = StagedWeights(self.network)
        for _ in staged.prepare(weights):
            yield
        staged.apply()
        number = self.learner.newest + 1
        if self.before is None or self.live.requests >= LEAST_REQUESTS:  # too few say nothing: the one before stays the measure
            self.before = (self.learner.serving, self.learner.generation, self.live)
        drafter = self.engine.drafter
        if isinstance(drafter, EagleSpeculator) and drafter.fallback is not None:
            self.before = None  # what was seen of n-grams says nothing about these weights
            if decision.recent_after > self.live.acceptance_length:
                drafter.fallback = None
        self._serves_another()
        self.counts["swaps"] += 1
        log.info("learning: generation %d is served: %s", number, decision.reason)
        self._record("swap", self.events, generation=number, **decision.to_dict())
        if self.generations is not None:
            self._save(weights, number, decision.to_dict())

    def save_first(self) -> None:
        """The generation that learning starts from, which all others are compared with."""
        self._save(self.learner.serving, self.learner.generation, {"reason": "the first"})

    def roll_back(self, reason: str) -> None:
        """Serves the generation before again."""
        assert self.before is not None
        weights, number, live = self.before
        staged = StagedWeights(self.network)
        for _ in staged.prepare(weights):
            pass
        staged.apply()
        fallen, self.before = self.learner.generation, None
        self.learner.serve_again(weights, number)
        # The generator may hold a candidate that was trained from the weights which fell.
        self._pieces, self._has_work = self.learner.pieces(), True
        self._serves_another()
        self.live = live
        self.counts["rollbacks"] += 1
        log.warning("learning: generation %d is taken back, generation %d is served again: %s", fallen, number, reason)
        self._record("rollback", self.events, generation=number, fallen=fallen, reason=reason)
        if (generations := self.generations) is not None:
            self._disk.submit(self._on_disk, lambda: generations.choose(number))

    def _serves_another(self) -> None:
        """The drafter's part of cached pages, and what the guard knows, belong to the weights before."""
        self.live = Live()
        self.engine.forget_drafts()

    def _refused(self, decision: Decision) -> None:
        log.info("learning: candidate refused: %s", decision.reason)
        self._record("refused", self.events, **decision.to_dict())

    def _save(self, weights: dict[str, Tensor], number: int, figures: dict[str, Any]) -> None:
        generations = self.generations
        assert generations is not None
        with torch.device("meta"):
            copy = EagleDrafter(self.learner.master.config)
        state = {name: value.cpu() for name, value in weights.items()}
        copy.load_state_dict({**state, "d2t": self.learner.master.d2t.cpu()}, assign=True)
        self._disk.submit(self._on_disk, lambda: generations.save(copy, number, figures))

    def _on_disk(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # a full disk costs the record, not the service
            log.error("learning: could not be written (%s)", error)

    def _record(self, kind: str, where: deque[dict[str, Any]], **figures: Any) -> None:
        event = {"event": kind, "seconds": round(time.time() - self._began, 3), "requests": self.requests}
        event |= {"generation": self.learner.generation, "steps": self.learner.counts.steps, **figures}
        where.append(event)
        if (generations := self.generations) is not None:
            self._disk.submit(self._on_disk, lambda: generations.record(event))

    # Figures

    @property
    def num_bytes(self) -> int:
        """What learning holds at most, apart from a step's activations."""
        return self.learner.num_bytes + self.config.memory_mb * 2**20 + self.fixed_tokens * self.target.bytes_per_token()

    def stats(self) -> dict[str, Any]:
        """Plain numbers, for metrics and the page."""
        spent, counts = self.budget.spent, self.learner.counts
        return {
            "generation": self.learner.generation,
            "requests": self.requests,
            "samples": len(self.ring),
            "sample_tokens": self.ring.num_tokens,
            "held_out": len(self.ring.held_out),
            "dropped": dict(self.ring.dropped),
            **{name: value for name, value in asdict(counts).items() if name != "loss"},
            "loss": counts.loss,
            **self.counts,
            "serving_seconds": spent.serving,
            "learning_seconds": spent.learning,
            "idle_seconds": spent.idle,
            "memory_bytes": self.num_bytes,
            "stopped": self.stopped or "",
            "acceptance_length": self.live.acceptance_length,
            "domains": {
                str(domain): {"before": self.first.get(domain), "after": self.live.length_of(domain)}
                for domain in range(len(self.domains.counts))
            },
            "curve": list(self.curve),
            "events": list(self.events),
        }


def answer(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Sample]:
    """The target's greedy answers, by the engine itself; before it serves."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    hook, engine.hook = engine.hook, None
    try:
        requests = [engine.add_request(prompt, params, learn=False) for prompt in prompts]
        while engine.has_unfinished():
            engine.step()
    finally:
        engine.hook = hook
    return [Sample(request.tokens, len(request.prompt)) for request in requests if request.num_answer >= LEAST_ANSWER]
