"""The drift guard: a request whose drafts are clearly worse than usual is drafted for less deeply until they are usual again.

What is usual is learnt from the engine's own requests: nothing is judged during the warm-up (`calibration_steps` speculative
steps, `calibration_probes` probed drafts), and the band follows slowly afterwards. Only the depth of drafts changes, and a
draft's depth changes no answer. A request's limit is halved, down to 1 and never to 0, so that it can be seen to recover.

    acceptance   by place in the draft, over the request's last twenty or so trials, against all requests'. Where the drafter
                 gives its own probabilities, they are subtracted: a hard text that it is unsure of is no drift
    rms, sink    size of the fed-back state and share of attention on the sink, by draft step, from the sampled probe
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

BAND_DECAY = 0.9995  # of what all requests showed, a trial
REQUEST_DECAY = 0.95  # of what one request showed, a trial: about twenty count
LEAST_TRIALS = 8.0
# A request has left the band when its rate lies this far below the usual one, in absolute terms and in standard errors.
# It is back when it lies no further than half of that below.
CLEAR_DROP, STANDARD_ERRORS = 0.25, 3.0
# The same for probed figures; those of the fed-back state are relative.
CLEAR_SHIFT = {"rms": 0.5, "sink_share": 0.25}
RELATIVE = ("rms",)
DEVIATIONS = 4.0
PROBE_DECAY = 0.995
PAUSE = 8  # steps between two shortenings of a request
# Steps for which a shortened request must be in the band before its limit is doubled. It is waited twice as long each time
# that the request falls back, until it has stayed in the band for the longest time.
FIRST_WAIT, LONGEST_WAIT = 16, 256
REASONS = ("acceptance", "rms", "sink")
REASON_OF = {"rms": "rms", "sink_share": "sink"}


@dataclass
class GuardCounts:
    """Since the engine's start. Plain numbers: another thread may read them."""

    requests: int = 0  # that were shortened at least once
    shortenings: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    recoveries: int = 0  # back to the full depth
    shortened: int = 0  # requests that are short now
    short_steps: int = 0  # speculative steps of requests that were short


class _Rates:
    """Decayed counts by place in the draft: how often it was reached, accepted, and expected by the drafter to be accepted."""

    def __init__(self, places: int, decay: float) -> None:
        self.decay = decay
        self.tried, self.accepted, self.expected = ([0.0] * places for _ in range(3))

    def add(self, tried: int, accepted: int, confidences: Sequence[float]) -> None:
        for place in range(min(tried, len(self.tried))):
            self.tried[place] = self.tried[place] * self.decay + 1
            self.accepted[place] = self.accepted[place] * self.decay + (place < accepted)
            self.expected[place] = self.expected[place] * self.decay + (confidences[place] if confidences else 0.0)

    def rate(self, place: int) -> float:
        return self.accepted[place] / self.tried[place]

    def surplus(self, place: int) -> float:
        """The rate minus the expected one."""
        return (self.accepted[place] - self.expected[place]) / self.tried[place]

    def forget_from(self, place: int) -> None:
        for deeper in range(place, len(self.tried)):
            self.tried[deeper] = self.accepted[deeper] = self.expected[deeper] = 0.0


class _Usual(_Rates):
    """Those of all requests. Nothing is judged by them during the first steps."""

    def __init__(self, places: int, calibration_steps: int) -> None:
        super().__init__(places, BAND_DECAY)
        self.steps_left = calibration_steps


class _Spread:
    """Decayed mean and deviation of a figure."""

    def __init__(self, name: str) -> None:
        self.name, self.probes, self.weight, self.mean, self.variance = name, 0, 0.0, 0.0, 0.0

    @property
    def width(self) -> float:
        clear = CLEAR_SHIFT[self.name] * (abs(self.mean) if self.name in RELATIVE else 1.0)
        return max(clear, DEVIATIONS * math.sqrt(self.variance))

    def add(self, value: float) -> None:
        self.probes += 1
        self.weight = self.weight * PROBE_DECAY + 1
        share, shift = 1 / self.weight, value - self.mean
        self.mean += share * shift
        self.variance = (1 - share) * (self.variance + share * shift * shift)


class _Watched:
    def __init__(self, limit: int) -> None:
        self.rates = _Rates(limit, REQUEST_DECAY)
        self.is_expected = False  # its drafts come with probabilities
        self.limit = limit
        self.since = 0  # steps since the limit changed
        self.wait = FIRST_WAIT
        self.drifting: set[str] = set()  # probed figures that were out of the band when last looked at
        self.unseen = 0  # steps since it was looked at
        self.was_short = False
        self.has_grown = False  # the last change lengthened it


class DriftGuard:
    def __init__(self, limit: int, *, calibration_steps: int = 256, calibration_probes: int = 16) -> None:
        """`limit`: the depth of a draft when all is well."""
        self.limit, self.calibration_steps, self.probes_needed = limit, calibration_steps, calibration_probes
        self.usual = self._calibrate()
        self.bands: dict[str, list[_Spread]] = {name: [] for name in CLEAR_SHIFT}
        self.watched: dict[Hashable, _Watched] = {}
        self.counts = GuardCounts()

    def _calibrate(self) -> dict[bool, _Usual]:
        """By whether drafts come with probabilities: a greedy draft and a drawn one are not compared."""
        return {is_expected: _Usual(self.limit, self.calibration_steps) for is_expected in (False, True)}

    def depth(self, request: Hashable) -> int:
        """How deep it may be drafted for."""
        return self.watched[request].limit if request in self.watched else self.limit

    def forget(self, request: Hashable) -> None:
        watched = self.watched.pop(request, None)
        if watched is not None:
            self.counts.shortened -= watched.limit < self.limit

    def renew(self) -> None:
        """The drafter has other weights: no request is shortened any more, and what is usual is learnt anew."""
        self.counts.recoveries += self.counts.shortened
        self.counts.shortened = 0
        self.watched.clear()
        self.usual = self._calibrate()
        self.bands = {name: [] for name in CLEAR_SHIFT}

    def record(
        self,
        request: Hashable,
        depth: int,
        accepted: int,
        *,
        nameable: bool = True,
        confidences: Sequence[float] = (),
    ) -> None:
        """A step's draft was `depth` deep and so many of its tokens were accepted.

        `confidences`: the drafter's probabilities of its tokens: for all steps of a request, or for none.

        `nameable`: the drafter could have named the token that the target chose after those. If it could not, the miss says
        nothing about the drafter and is not counted.
        """
        tried = min(depth, accepted + nameable)
        watched, usual = self._watch(request), self.usual[bool(confidences)]
        watched.is_expected = bool(confidences)
        usual.add(tried, accepted, confidences)
        watched.rates.add(tried, accepted, confidences)
        watched.since += 1
        watched.unseen += 1
        if watched.unseen >= LONGEST_WAIT:
            watched.drifting.clear()  # it may not be looked at again for long; should it still drift, it is seen then
        self.counts.short_steps += watched.limit < self.limit
        if usual.steps_left:
            usual.steps_left -= 1
        elif watched.since >= PAUSE and self._below_the_band(watched):
            self._shorten(watched, "acceptance")
        elif watched.since >= watched.wait and watched.limit < self.limit and self._is_back(watched):
            self._lengthen(watched)
        elif watched.since >= LONGEST_WAIT and watched.limit == self.limit:
            watched.wait, watched.has_grown = FIRST_WAIT, False

    def record_probe(self, request: Hashable, figures: Mapping[str, Sequence[float | None]]) -> None:
        """The probe looked at one draft: its figures by draft step, None where it saw none."""
        watched = self._watch(request)
        watched.unseen = 0
        for name, bands in self.bands.items():
            values = list(figures.get(name, ()))[: self.limit]
            bands.extend(_Spread(name) for _ in range(len(values) - len(bands)))
            is_out = False
            for band, value in zip(bands, values, strict=False):
                if value is None:
                    continue
                if band.probes < self.probes_needed:
                    band.add(value)
                    continue
                width = band.width
                is_out |= abs(value - band.mean) > width
                band.add(min(max(value, band.mean - width), band.mean + width))  # an outlier does not make the band wide
            if is_out:
                watched.drifting.add(name)
                self._shorten(watched, REASON_OF[name])
            elif any(value is not None for value in values):
                watched.drifting.discard(name)

    def _watch(self, request: Hashable) -> _Watched:
        if request not in self.watched:
            self.watched[request] = _Watched(self.limit)
        return self.watched[request]

    def _judged(self, watched: _Watched) -> list[tuple[float, float]]:
        """For each place with enough trials: how far it lies below the usual, and how far it may."""
        rates, usual = watched.rates, self.usual[watched.is_expected]
        judged = []
        for place in range(watched.limit):
            if (trials := rates.tried[place]) >= LEAST_TRIALS:
                error = math.sqrt(usual.rate(place) * (1 - usual.rate(place)) / trials)
                drop = usual.surplus(place) - rates.surplus(place)
                judged.append((drop, max(CLEAR_DROP, STANDARD_ERRORS * error)))
        return judged

    def _below_the_band(self, watched: _Watched) -> bool:
        return any(drop > allowed for drop, allowed in self._judged(watched))

    def _is_back(self, watched: _Watched) -> bool:
        judged = self._judged(watched)
        return not watched.drifting and bool(judged) and all(drop <= allowed / 2 for drop, allowed in judged)

    def _shorten(self, watched: _Watched, reason: str) -> None:
        if watched.limit == 1:
            watched.since = 0
            return
        if watched.limit == self.limit:
            self.counts.shortened += 1
            self.counts.requests += not watched.was_short
            watched.was_short = True
        if watched.has_grown:
            watched.wait, watched.has_grown = min(2 * watched.wait, LONGEST_WAIT), False
        self.counts.shortenings[reason] += 1
        watched.limit, watched.since = max(1, watched.limit // 2), 0

    def _lengthen(self, watched: _Watched) -> None:
        watched.rates.forget_from(watched.limit)  # what lies deeper is judged anew
        watched.limit, watched.since, watched.has_grown = min(2 * watched.limit, self.limit), 0, True
        if watched.limit == self.limit:
            self.counts.recoveries += 1
            self.counts.shortened -= 1
