"""The drift lab: measures every drafter on every suite. The target answers each prompt once; all drafters share the answers.

prompts of all suites -> the target's answers (batched, once) -> for each group of texts of similar length: one target pass and
one rollout per drafter
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fledge import progress, sources
from fledge.bench.datasets import Item, load_items
from fledge.bench.loops import is_looping
from fledge.bench.provenance import provenance
from fledge.checkpoints.hf import load_config, load_decoder
from fledge.drift import suites
from fledge.drift.metrics import MetricAccumulator, TargetAccumulator, by_text
from fledge.drift.probes import find_sink
from fledge.drift.prompts import load_documents
from fledge.drift.results import Measured, suite_result
from fledge.drift.rollout import roll_out, target_probabilities
from fledge.drift.suites import Settings, Suite
from fledge.drift.texts import Answers, DrafterUnderTest, TargetText, TokenIds, in_groups, load_subjects, read_texts
from fledge.engine.build import fit
from fledge.engine.config import EngineConfig
from fledge.errors import UserError
from fledge.models.decoder import Decoder
from fledge.tokenizer import Tokenizer

TABLE_DEPTHS = (1, 3, 5, 7, 10, 16)
SHORTEST_ANSWER = 3  # tokens: the first comes from the target itself, and no draft can start from the last
SINK_TEXTS = 8
# Tokens of the texts that go through the target and the drafters as one batch. A CPU gains nothing from larger batches.
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 1 << 16}
ANSWERS_AT_ONCE = {"cpu": 32, "cuda": 256}

Place = tuple[str, str, str]  # suite, condition, question


class Lab:
    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        subjects: Sequence[DrafterUnderTest],
        config: EngineConfig,
        settings: Settings,
        on_progress: progress.Report = progress.silent,
    ) -> None:
        self.decoder, self.tokenizer, self.subjects, self.config = decoder, tokenizer, list(subjects), config
        self.settings, self.progress = settings, on_progress
        for subject in self.subjects:
            decoder.check_taps(subject.network.config.aux_layer_ids)
            subject.network.share(decoder.embed_tokens, decoder.lm_head)
        self.taps = sorted({i for subject in self.subjects for i in subject.network.config.aux_layer_ids})
        self.longest = config.max_model_len - settings.max_tokens
        self.answer = Answers(decoder, config, settings.max_tokens, on_progress)
        self.documents_sha256: str | None = None
        self.depths = [d for d in TABLE_DEPTHS if d <= settings.depth]
        self.probe_depths = sorted({*self.depths, *range(1, settings.probe_depth + 1)})

    def plan(self, items: Sequence[Item], documents: Path | None) -> list[Suite]:
        """Builds the suites. Texts of the first one are also probed to the full depth, drafted with noise, and sampled."""
        settings, tokenizer = self.settings, self.tokenizer
        items = [replace(item, id=f"{number}: {item.id}") for number, item in enumerate(items, 1)]  # ids may repeat
        texts, source = load_documents(documents)
        self.documents_sha256 = hashlib.sha256("\0".join(document.text for document in texts).encode()).hexdigest()
        few = suites.chosen(items, settings.prompts)
        made = [
            suites.domains(tokenizer, items),
            suites.chat_templates(tokenizer, few, settings.templates),
            suites.system_prompts(tokenizer, few, settings.system_prompts),
        ]
        made = [suites.within(suite, self.longest) for suite in made]
        self.answer([prompt for suite in made for condition in suite.conditions for prompt in condition.prompts.values()])
        counts = (settings.documents, settings.questions)
        made.append(suites.lengths(tokenizer, texts, few, settings.lengths, *counts, self.answer, self.longest, source))
        self.answer([prompt for condition in made[-1].conditions for prompt in condition.prompts.values()])
        ends = self.decoder.config.eos_token_ids
        made.append(suites.multi_turn(tokenizer, items, settings.conversations, self.answer, self.longest, ends))
        made = [suite for suite in made if suite.conditions]
        if not made:
            raise UserError(
                f"no prompt fits: {self.config.max_model_len} tokens of context less {settings.max_tokens} for the answer "
                f"leave {self.longest}; raise --max-model-len or lower --max-tokens"
            )
        return made

    def run(self, plan: Sequence[Suite]) -> dict[str, Any]:
        probed = {prompt: name for condition in plan[0].conditions for name, prompt in condition.prompts.items()}
        answers = dict(zip(probed, self.answer(list(probed)), strict=True))
        if all(len(answer) < SHORTEST_ANSWER for answer in answers.values()):
            raise UserError(
                "the target ends every answer at once, so there is nothing to draft; give other prompts with --data"
            )
        sampled = [temperature for temperature in self.settings.temperatures if temperature > 0]
        for temperature in sampled:
            self.answer(list(probed), temperature)
        self.answer.release()
        texts = [[*prompt, *answer] for prompt, answer in answers.items()][:SINK_TEXTS]
        sink = find_sink(self.decoder, texts)
        accumulators = Accumulators(self, sink.column)
        places: dict[TokenIds, list[Place]] = {}
        for suite in plan:
            for condition in suite.conditions:
                for name, prompt in condition.prompts.items():
                    places.setdefault(prompt, []).append((suite.name, condition.name, name))
        self._over(list(places), 0.0, lambda prompts, texts: accumulators.greedy(prompts, texts, places, probed))
        for temperature in sampled:
            self._over(list(probed), temperature, partial(accumulators.sampled, probed=probed, temperature=temperature))
        return {
            "drafters": [subject.to_dict() for subject in self.subjects],
            "settings": asdict(self.settings),
            "sink": {**asdict(sink), "clear": sink.clear, "token": self._token(texts[0][sink.column])},
            "target_states": {name: accumulator.to_dict() for name, accumulator in accumulators.states.items()},
            "probes": {name: accumulator.to_dict() for name, accumulator in accumulators.whole.items()},
            "suites": [*(self._suite(suite, accumulators) for suite in plan), *accumulators.of_all_prompts()],
        }

    def _token(self, token: int) -> str:
        return str(self.tokenizer.token(token))

    def _over(
        self, prompts: list[TokenIds], temperature: float, use: Callable[[list[TokenIds], list[TargetText]], None]
    ) -> None:
        """Runs the target over prompts and answers, in groups of texts of similar length, and calls `use` with each group."""
        answers = dict(zip(prompts, self.answer(prompts, temperature), strict=True))
        prompts = [prompt for prompt in prompts if len(answers[prompt]) >= SHORTEST_ANSWER]
        room, done = TOKENS_AT_ONCE[torch.device(self.config.device).type], 0
        for group in in_groups([len(prompt) + len(answers[prompt]) for prompt in prompts], room):
            self.progress("drafting over the answers", done, len(prompts))
            mine = [prompts[index] for index in group]
            texts = [([*prompt, *answers[prompt]], len(prompt)) for prompt in mine]
            use(mine, read_texts(self.decoder, texts, self.taps))
            done += len(group)

    def _suite(self, suite: Suite, accumulators: Accumulators) -> dict[str, Any]:
        conditions = []
        for condition in suite.conditions:
            prompts = list(condition.prompts.values())
            facts = {
                "name": condition.name,
                "note": condition.note,
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)) / len(prompts),
                "answer_tokens": sum(map(len, self.answer(prompts))) / len(prompts),
            }
            mine = {subject.name: accumulators.by_place[subject.name, suite.name, condition.name] for subject in self.subjects}
            conditions.append(Measured(facts, mine))
        return suite_result(suite.name, suite.explanation, suite.baseline, self.depths, conditions)


class Accumulators:
    """All figures of a run: by drafter, suite and condition; over all prompts; with noise; with sampling."""

    def __init__(self, lab: Lab, sink: int) -> None:
        """`sink`: the column of the attention sink."""
        self.lab, self.sink, settings = lab, sink, lab.settings
        names = [subject.name for subject in lab.subjects]
        self.by_place: dict[tuple[str, str, str], MetricAccumulator] = {}
        self.whole = {name: MetricAccumulator(lab.probe_depths) for name in names}
        self.noisy = {(name, level): MetricAccumulator(lab.depths) for name in names for level in settings.noise}
        self.hot = {(name, t): MetricAccumulator(lab.depths) for name in names for t in settings.temperatures if t > 0}
        self.states = {subject.name: TargetAccumulator(subject.network) for subject in lab.subjects}

    def greedy(
        self,
        prompts: list[TokenIds],
        texts: list[TargetText],
        places: dict[TokenIds, list[Place]],
        probed: dict[TokenIds, str],
    ) -> None:
        lab, settings = self.lab, self.lab.settings
        looping = [is_looping(text.tokens_T[text.answer_start :].tolist()) for text in texts]
        chosen = [index for index, prompt in enumerate(prompts) if prompt in probed]
        # Probed texts are drafted deeper than the others. Without probes the attention probabilities need not be materialised.
        parts = ((chosen, lab.probe_depths), ([i for i in range(len(prompts)) if i not in set(chosen)], lab.depths))
        for subject in lab.subjects:
            mine = [self._seen_by(subject, text) for text in texts]
            for indexes, depths in parts:
                if not indexes:
                    continue
                probe = indexes is chosen
                rollout = roll_out(subject.network, [mine[i] for i in indexes], depths[-1], sink=self.sink, probe=probe)
                for index, figures in zip(indexes, by_text(rollout, len(indexes), depths), strict=True):
                    for suite, condition, name in places[prompts[index]]:
                        accumulator = self.by_place.setdefault((subject.name, suite, condition), MetricAccumulator(lab.depths))
                        accumulator.add(name, figures, looping[index])
                    if prompts[index] in probed:
                        self.whole[subject.name].add(probed[prompts[index]], figures, looping[index])
                        self.states[subject.name].add(mine[index], self.sink)
            for number, level in enumerate(settings.noise if chosen else ()):
                disturbed = [mine[i] for i in chosen]
                seed = len(self.whole[subject.name].texts) * 100 + number
                rollout = roll_out(subject.network, disturbed, settings.depth, noise=level, seed=seed, probe=False)
                for index, figures in zip(chosen, by_text(rollout, len(chosen), lab.depths), strict=True):
                    self.noisy[subject.name, level].add(probed[prompts[index]], figures, looping[index])

    def sampled(
        self, prompts: list[TokenIds], texts: list[TargetText], probed: dict[TokenIds, str], temperature: float
    ) -> None:
        lab, depth = self.lab, self.lab.settings.depth
        p = target_probabilities(lab.decoder, texts, depth, temperature)
        for subject in lab.subjects:
            mine = [self._seen_by(subject, text) for text in texts]
            rollout = roll_out(subject.network, mine, depth, probe=False, temperature=temperature, target_p=p)
            found = by_text(rollout, len(texts), lab.depths, sampled=True)
            for prompt, text, figures in zip(prompts, texts, found, strict=True):
                looping = is_looping(text.tokens_T[text.answer_start :].tolist())
                self.hot[subject.name, temperature].add(probed[prompt], figures, looping)

    def _seen_by(self, subject: DrafterUnderTest, text: TargetText) -> TargetText:
        """Returns `text` with only the layers that this drafter taps; the target pass captured those of all drafters."""
        return replace(text, taps=[text.taps[self.lab.taps.index(i)] for i in subject.network.config.aux_layer_ids])

    def of_all_prompts(self) -> list[dict[str, Any]]:
        """Returns the suites that need no prompts of their own: noise, depth, temperature."""
        lab, settings = self.lab, self.lab.settings
        names = [subject.name for subject in lab.subjects]

        def measured(name: str, accumulators: dict[str, MetricAccumulator]) -> Measured:
            return Measured({"name": name, "note": "", "prompts": len(next(iter(accumulators.values())).texts)}, accumulators)

        noise = [measured("no noise", self.whole)]
        noise += [measured(f"α = {level:g}", {n: self.noisy[n, level] for n in names}) for level in settings.noise]
        hot = [
            measured(f"T = {t:g}", {n: self.hot[n, t] if t > 0 else self.whole[n] for n in names})
            for t in settings.temperatures
        ]
        all_depths = list(range(1, settings.probe_depth + 1))
        made = [
            suite_result("noise", NOISE, "no noise", lab.depths, noise),
            suite_result("depth", DEPTH, None, all_depths, [measured("all prompts", self.whole)]),
        ]
        if hot:
            made.append(suite_result("temperature", TEMPERATURE, hot[0].name, lab.depths, hot))
        return made


NOISE = (
    "Gaussian noise of α times the state's own RMS on every state that enters a draft step (the fused state at first, "
    "then the fed-back ones); the context stays clean."
)
DEPTH = "Drafting ever deeper, past the depth that a drafter was trained for."
TEMPERATURE = (
    "The target samples its answers, and drafts are sampled alike. A draft is accepted with probability min(1, q/p) of what "
    "the target wrote, so that these are exact expectations over the drafts."
)


def run_lab(
    model: str,
    drafters: Sequence[str],
    *,
    settings: Settings,
    data: str = "builtin",
    documents: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int = 0,
    on_progress: progress.Report = progress.silent,
) -> dict[str, Any]:
    """Runs all suites and returns the figures of the report. `drafters`: folders or names, each plain or as `label=folder`."""
    began = time.monotonic()
    items = load_items(data, limit=settings.prompts_per_category)
    on_progress("loading the target")
    folder = sources.resolve(model)
    tokenizer = Tokenizer(folder)
    config = EngineConfig(device=device, dtype=dtype, max_model_len=max_model_len).resolve(load_config(folder))
    config = replace(config, max_num_seqs=ANSWERS_AT_ONCE[torch.device(config.device).type])
    decoder = fit(load_decoder(folder, config.activation_dtype), config)
    subjects = load_subjects(drafters, model, decoder, config)
    lab = Lab(decoder, tokenizer, subjects, config, settings, on_progress)
    with torch.inference_mode():
        figures = lab.run(lab.plan(items, documents))
    return {
        "model": model,
        "device": config.device,
        "dtype": config.dtype,
        "data": data,
        **figures,
        "provenance": provenance([item.turns for item in items]) | {"documents_sha256": lab.documents_sha256},
        "seconds": time.monotonic() - began,
    }
