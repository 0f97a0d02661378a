"""The engine hook for learning: collects samples from finished requests, trains between engine steps, and swaps weights.

    before_step   micro-steps of training, if the budget allows; an accepted candidate is copied in here
    after_step    samples and live acceptance of the requests that finished; cheap
    idle          micro-steps of training, while nothing runs

An error here is logged and ends learning; serving continues.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fledge.engine.engine import Engine
from fledge.engine.executors.hidden_states import MAX_REQUESTS
from fledge.engine.memory import readable
from fledge.engine.request import Delta
from fledge.errors import UserError
from fledge.learning.candidate import Candidate
from fledge.learning.collector import Collector
from fledge.learning.config import LearnConfig
from fledge.learning.fixed_set import FixedSet, answer
from fledge.learning.generations import Generations
from fledge.learning.journal import Journal
from fledge.learning.learner import Learner
from fledge.learning.memory import memory_bytes
from fledge.learning.micro_steps import Budget, MicroSteps
from fledge.learning.samples import LEAST_ANSWER, SampleRing
from fledge.learning.served import ServedDrafter, staged_bytes, weights_of
from fledge.learning.target import MAX_PREFIXES, ServedTarget
from fledge.models.drafter import EagleDrafter
from fledge.speculation.methods.eagle import EagleSpeculator

log = logging.getLogger("fledge.learning")

# A micro-step that takes more than 0.2 s runs only while nothing is served, and only after a quiet period, because a request
# that arrives must wait for it. Under load, one of up to 1 s may run once a minute, so that learning does not stop for good
# after a moment in which the machine was slow.
MAX_PAUSE, LONG_PAUSE, LONG_PAUSE_EVERY = 0.2, 1.0, 60.0
# Micro-steps run back to back for up to this many seconds: each interruption also slows the engine steps after it.
SLICE = 0.1
# Seconds of credit needed before micro-steps run. At a budget of 5 %: one interruption per second, in < 1 % of the cycles.
START_CREDIT = 0.05


class Learning:
    """The hook of one engine. Only the engine's thread calls it; other threads may read `stats`."""

    def __init__(
        self,
        engine: Engine,
        master: EagleDrafter,
        config: LearnConfig,
        fixed_prompts: Sequence[Sequence[int]] = (),
        *,
        generations: Generations | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`master`: the served drafter in fp32, not packed. `config`: already resolved. `fixed_prompts`: prompts of the fixed
        set. `generations`: those of `config.folder`."""
        assert isinstance(engine.drafter, EagleSpeculator)
        self.engine, self.config, self.clock, self.fixed_prompts = engine, config, clock, fixed_prompts
        self.target = ServedTarget(engine.decoder, master.config.aux_layer_ids)
        self.ring = SampleRing(
            config.memory_mb * 2**20 // self.target.bytes_per_token(),
            config.held_out_texts,
            min_held_out=config.min_held_out,
            sample_tokens=config.sample_tokens,
            max_age=config.max_age,
            seed=config.seed,
        )
        if self.ring.max_held_out_states < 2 * LEAST_ANSWER:  # the gate could not run
            needed = 4 * config.min_held_out * 2 * LEAST_ANSWER * self.target.bytes_per_token() // 2**20 + 1
            raise UserError(f"--learn-memory {config.memory_mb} is too little for this model; give {needed} MiB or more")
        self.budget = Budget(config.budget, clock)
        self.journal = Journal(generations, self._counts)
        weights = {name: value.to(self.target.device) for name, value in weights_of(master).items()}
        self.served = ServedDrafter(engine, weights, master.d2t, self.journal)
        self.learner = Learner(
            Candidate(master, self.target, config, weights, max(config.sample_tokens, engine.config.max_model_len)),
            self.target,
            self.ring,
            self.served,
            config,
            depth=max(1, engine.controller.limit),
        )
        self.collector = Collector(engine, config, self.target, self.ring, self.served, self.journal, self.budget, clock)
        self.fixed_tokens = 0
        self.stopped: str | None = None  # why learning has stopped; None: it has not
        self.micro_steps = MicroSteps(clock, self._synchronize)
        self._has_work = True  # False: there is nothing to do until new samples arrive
        self.slice_seconds = SLICE
        self._long_pause_at = clock()  # when the last long micro-step under load began
        self.states_limit = min(config.sample_tokens, engine.config.max_model_len)  # tokens per running request
        engine.executor.collect_states(limit=self.states_limit)
        self._restart()
        engine.hook = self

    # The engine's hook

    def before_step(self) -> None:
        was_serving = self.budget.is_serving
        self.budget.serve()
        self._expire()
        # A request that ended an idle period may already have waited for a micro-step.
        if not was_serving or self.budget.credit < START_CREDIT:
            return
        is_long = self.micro_steps.expected_seconds > MAX_PAUSE
        if is_long and not self._allows_long_pause():
            return
        self._work(lambda: self.budget.credit > 0)

    def after_step(self, deltas: Sequence[Delta]) -> None:
        if self.stopped is not None:
            return
        self.collector.watch(deltas)
        finished = [delta.request for delta in deltas if delta.finished]
        if finished:
            began = self.clock()
            self._guarded(lambda: self._take_in(finished))
            self.budget.charge(self.clock() - began, collecting=True)
            self._guarded(self._check_live)
        if not self.engine.has_unfinished():
            self.budget.rest()

    def idle(self, *, is_quiet: bool = True) -> bool:
        """Runs micro-steps. Returns False if none can run until more requests are served or, if not quiet, until it is."""
        if self.budget.is_serving:
            self.budget.rest()
        self._expire()
        if not is_quiet and self.micro_steps.expected_seconds > MAX_PAUSE:
            return False
        return self._work(lambda: True)

    def due_in(self) -> float | None:
        # Training may still hold samples that have left the ring.
        oldest = min([self.target.oldest, *(one.arrival for one in self.learner.at_work)])
        at = min(self.ring.expires_at, oldest + self.config.max_age)
        return None if self.stopped is not None or math.isinf(at) else max(0.0, at - self.ring.clock())

    def warm_up(self) -> list[str]:
        """Answers the prompts of the fixed set, and runs one training step on made-up tokens: this measures how long a step
        takes and, on a GPU, compiles it. Returns log lines."""
        lines: list[str] = []

        def prepare() -> None:
            if self.fixed_prompts:
                texts = answer(self.engine, self.fixed_prompts, self.config.fixed_tokens)
                self.learner.fixed = FixedSet.of(texts)
                self.fixed_tokens = sum(len(one.tokens) for one in texts)
                lines.append(f"learning: fixed set of {len(texts)} answers, half of them replayed, half for the gate")
            self.micro_steps.start(self.learner.warm_up())
            while self.micro_steps.next is not None:
                self.micro_steps.run()
            self._restart()
            lines.append(self.describe())

        self._guarded(prepare)
        return lines if self.stopped is None else []

    def describe(self) -> str:
        """Returns the log line of the start: which data is kept, where and for how long."""
        config = self.config
        where = f"generations are kept in {config.folder}" if config.folder is not None else "nothing is written to disk"
        return (
            f"learning from requests: up to {config.memory_mb} MiB of their tokens and hidden states stay in memory, and the "
            f"states of {MAX_PREFIXES} cached prefixes, for {config.max_age / 3600:g} hours at most; the states of "
            f"{MAX_REQUESTS} requests while they run; counts of hashed tokens by domain until the process ends; {where}; "
            f'nothing leaves this machine; a request with "learn": false is not kept. Budget {config.budget:g} % of the time; '
            f"memory {readable(self.num_bytes)} in all"
        )

    def close(self) -> None:
        """Waits until the journal is written."""
        self.journal.close()

    # Work

    def _work(self, goes_on: Callable[[], bool]) -> bool:
        """Runs one micro-step, and more while they fit a slice and `goes_on()` is true; returns whether there is more to do."""
        if self.stopped is not None or not self._has_work:
            return False
        spent = 0.0
        while True:
            began = self.clock()
            self._guarded(self._micro_step)
            seconds = self.clock() - began
            self.budget.charge(seconds)
            spent += seconds
            has_more = self._has_work and self.stopped is None
            if not has_more or not goes_on() or spent + self.micro_steps.expected_seconds > self.slice_seconds:
                self.engine.executor.interrupted()
                return has_more

    def _micro_step(self) -> None:
        self.micro_steps.run()
        self._has_work = self.micro_steps.next is not None

    def _allows_long_pause(self) -> bool:
        if self.micro_steps.expected_seconds > LONG_PAUSE or self.clock() - self._long_pause_at < LONG_PAUSE_EVERY:
            return False
        self._long_pause_at = self.clock()
        return True

    def _synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _restart(self) -> None:
        """Restarts the micro-steps to drop what they hold: expired samples, or a candidate based on rolled-back weights."""
        self.learner.at_work = []
        self.micro_steps.start(self.learner.micro_steps())
        self._has_work = True

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if is_out_of_memory(error):
                self._stop("out of memory")
            else:
                log.exception("learning failed")
                self._stop("an error occurred (traceback above)")

    def _stop(self, reason: str) -> None:
        """Stops learning and frees its memory. The served generation stays."""
        self.stopped = reason
        log.error("learning stops: %s; serving goes on with generation %d", reason, self.served.generation)
        self.ring.forget_all()
        self.target.release()
        self.collector.shortened.clear()
        self.micro_steps.start(iter(()))
        self.engine.executor.collect_states(limit=0)
        self.learner.release()
        self.served.release()
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take_in(self, finished: Sequence[Any]) -> None:
        if self.collector.take_in(finished):
            self._has_work = True

    def _expire(self) -> None:
        """Drops all data of requests that has reached the maximum age."""
        if self.due_in() != 0:
            return
        self.ring.expire()
        oldest = self.ring.clock() - self.config.max_age
        self.target.forget_until(oldest)
        if any(one.arrival <= oldest for one in self.learner.at_work):  # the generator holds them
            self._restart()

    # Decisions

    def _check_live(self) -> None:
        began = self.clock()
        if self.served.has_fallen():
            self.roll_back("live acceptance has fallen")
        self.budget.charge(self.clock() - began)  # not as collecting: a roll-back would use up that share

    def roll_back(self, reason: str) -> None:
        """Serves the previous generation again, and continues training from it."""
        self.served.roll_back(reason)
        self.learner.start_over()
        self._restart()

    # Figures

    def _counts(self) -> dict[str, int]:
        return {
            "requests": self.collector.requests,
            "generation": self.served.generation,
            "steps": self.learner.counts.steps,
        }

    @property
    def num_bytes(self) -> int:
        """Upper bound of the memory that learning holds, without a step's activations."""
        if self.stopped is not None:
            return 0
        return memory_bytes(
            self.learner.candidate.master.config,
            self.config,
            staged_bytes=staged_bytes(self.served.network),
            head_bytes=self.target.head_bytes,
            fixed_tokens=self.fixed_tokens,
            running_bytes=MAX_REQUESTS * self.states_limit * self.target.num_channels * self.target.decoder.dtype.itemsize,
        )

    def history(self) -> dict[str, Any]:
        return self.journal.history()

    def stats(self) -> dict[str, Any]:
        """Returns plain numbers for the metrics and the web page."""
        spent, counts, collector, served = self.budget.spent, self.learner.counts, self.collector, self.served
        return {
            "generation": served.generation,
            "requests": collector.requests,
            "opted_out": collector.opted_out,
            "skipped": collector.skipped,
            "samples": len(self.ring),
            "sample_tokens": self.ring.num_tokens,
            "clients": len(self.ring.by_client),
            "held_out": len(self.ring.held_out),
            "dropped": dict(self.ring.dropped),
            **asdict(counts),
            "swaps": served.num_swaps,
            "rollbacks": served.num_rollbacks,
            "serving_seconds": spent.serving,
            "learning_seconds": spent.learning,
            "idle_seconds": spent.idle,
            "memory_bytes": self.num_bytes,
            "stopped": self.stopped or "",
            "acceptance_length": served.live.acceptance_length,
            "domains": {
                str(domain): {"before": collector.lengths_before.get(domain), "after": served.live.length_of(domain)}
                for domain in collector.domains.ids
            },
        }


def is_out_of_memory(error: Exception) -> bool:
    # On a CPU torch raises a RuntimeError with this text.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
