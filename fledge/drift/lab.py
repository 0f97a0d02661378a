"""The drift lab: every drafter over every suite, from one greedy answer of the target per prompt.

prompts of all suites -> the target's answers (batched, once) -> per text: one target pass, one rollout per drafter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.bench.datasets import Item, load_items
from fledge.bench.provenance import provenance
from fledge.checkpoints.eagle3 import load_drafter
from fledge.drift import suites
from fledge.drift.documents import load_documents
from fledge.drift.rollout import TargetText, roll_out
from fledge.drift.sinks import Sink, find_sink
from fledge.drift.suites import Settings, Suite, TokenIds
from fledge.drift.tally import Tally, TargetTally
from fledge.engine.build import Speculation, build_engine, fit
from fledge.engine.config import EngineConfig
from fledge.engine.offline import answer_generator
from fledge.errors import ModelError, UserError
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.tokenizer import Tokenizer
from fledge.training.loops import is_looping

TABLE_DEPTHS = (1, 3, 5, 7, 10, 16)
SHORTEST_ANSWER = 3  # tokens: the first is the target's own, and the last cannot be drafted from
SINK_TEXTS = 8

Progress = Callable[[str], None]


@dataclass
class Subject:
    """One drafter under study."""

    name: str
    network: EagleDrafter
    parameters: int  # its own, before packing


class Lab:
    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        subjects: Sequence[Subject],
        config: EngineConfig,
        settings: Settings,
        on_progress: Progress = lambda _: None,
    ) -> None:
        self.decoder, self.tokenizer, self.subjects, self.config = decoder, tokenizer, list(subjects), config
        self.settings, self.progress = settings, on_progress
        for subject in self.subjects:
            decoder.check_taps(subject.network.config.aux_layer_ids)
            subject.network.share(decoder.embed_tokens, decoder.lm_head)
        self.taps = sorted({i for subject in self.subjects for i in subject.network.config.aux_layer_ids})
        self.longest = config.max_model_len - settings.max_tokens
        self.answers: dict[TokenIds, list[int]] = {}
        self._generator = None
        self.sink: Sink | None = None

    # --- the target's answers -----------------------------------------------------------------------------------

    def answer(self, prompts: list[TokenIds]) -> list[list[int]]:
        """Greedy, each prompt once."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.answers]
        if new:
            self._generator = self._generator or answer_generator(
                self.decoder,
                device=self.config.device,
                dtype=self.config.dtype,
                concurrency=self.config.max_num_seqs,
                max_model_len=self.config.max_model_len,
            )
            done = self._generator.generate(new, max_tokens=self.settings.max_tokens)
            for count, answer in enumerate(done, 1):
                self.answers[new[answer.index]] = list(answer.tokens)
                self.progress(f"the target answers: {count} of {len(new)}")
        return [self.answers[prompt] for prompt in prompts]

    # --- suites -------------------------------------------------------------------------------------------------

    def plan(self, items: Sequence[Item], documents: Path | None) -> list[Suite]:
        settings, tokenizer = self.settings, self.tokenizer
        texts, source = load_documents(documents)
        few = suites.chosen(items, settings.prompts)
        made = [
            suites.domains(tokenizer, items),
            suites.chat_templates(tokenizer, few),
            suites.system_prompts(tokenizer, few, settings.system_prompts),
            suites.lengths(tokenizer, texts, settings.lengths, settings.documents, self.longest, source),
        ]
        made = [suites.within(suite, self.longest) for suite in made]
        self.answer([prompt for suite in made for condition in suite.conditions for prompt in condition.prompts])
        ends = self.decoder.config.eos_token_ids
        made.append(suites.multi_turn(tokenizer, items, settings.conversations, self.answer, self.longest, ends))
        return [suite for suite in made if suite.conditions]

    def run(self, plan: Sequence[Suite]) -> dict[str, Any]:
        """`plan[0]` is the one whose texts are probed to the full depth."""
        probed = list(dict.fromkeys(prompt for condition in plan[0].conditions for prompt in condition.prompts))
        if all(len(self.answers[prompt]) < SHORTEST_ANSWER for prompt in probed):
            raise UserError(
                "the target ends every answer at once, so there is nothing to draft; give other prompts with --data"
            )
        self.sink = find_sink(self.decoder, [self._tokens(prompt) for prompt in probed[:SINK_TEXTS]])
        tallies, whole, noisy, states = self._roll_out(plan, set(probed))
        results = [self._suite(suite, tallies) for suite in plan]
        results.append(self._noise_suite(whole, noisy))
        results.append(self._depth_suite(whole))
        results.append(self._temperature_suite(probed[: self.settings.temperature_prompts]))
        return {
            "drafters": [_described(subject) for subject in self.subjects],
            "settings": asdict(self.settings),
            "sink": {**asdict(self.sink), "clear": self.sink.clear, "token": self._sink_token(probed[0])},
            "target_states": {name: tally.to_dict() for name, tally in states.items()},
            "probes": {name: tally.to_dict() for name, tally in whole.items()},
            "suites": results,
        }

    def _tokens(self, prompt: TokenIds) -> list[int]:
        return [*prompt, *self.answers[prompt]]

    def _sink_token(self, prompt: TokenIds) -> str:
        return str(self.tokenizer.token(self._tokens(prompt)[self.sink.column]))

    def _roll_out(self, plan: Sequence[Suite], probed: set[TokenIds]):
        """Each text once: the target's pass, then every drafter's rollout, added to every condition that has the text."""
        settings, names = self.settings, [subject.name for subject in self.subjects]
        places: dict[TokenIds, list[tuple[str, str]]] = {}
        for suite in plan:
            for condition in suite.conditions:
                for prompt in condition.prompts:
                    places.setdefault(prompt, []).append((suite.name, condition.name))
        depths = [d for d in TABLE_DEPTHS if d <= settings.depth]
        probe_depths = sorted({*depths, *range(1, settings.probe_depth + 1)})
        tallies = {(n, *place): Tally(depths) for n in names for at in places.values() for place in at}
        whole = {name: Tally(probe_depths) for name in names}
        noisy = {(name, level): Tally(depths) for name in names for level in settings.noise}
        states = {subject.name: TargetTally(subject.network) for subject in self.subjects}
        for count, (prompt, at) in enumerate(places.items(), 1):
            self.progress(f"drafting over the answers: {count} of {len(places)}")
            answer = self.answers[prompt]
            if len(answer) < SHORTEST_ANSWER:
                continue
            looping = is_looping(answer)
            text = TargetText.of(self.decoder, self._tokens(prompt), len(prompt), self.taps)
            is_probed = prompt in probed
            for number, subject in enumerate(self.subjects):
                mine = replace(text, taps=[text.taps[self.taps.index(i)] for i in subject.network.config.aux_layer_ids])
                depth = max(settings.depth, settings.probe_depth if is_probed else 0)
                rollout = roll_out(subject.network, mine, depth, sink=self.sink.column)
                for place in at:
                    tallies[(subject.name, *place)].add(rollout, looping)
                if is_probed:
                    whole[subject.name].add(rollout, looping)
                    states[subject.name].add(mine, self.sink.column)
                    for level in settings.noise:
                        disturbed = roll_out(
                            subject.network, mine, settings.depth, noise=level, seed=count * 100 + number, probe=False
                        )
                        noisy[subject.name, level].add(disturbed, looping)
        return tallies, whole, noisy, states

    def _suite(self, suite: Suite, tallies: dict[tuple[str, str, str], Tally]) -> dict[str, Any]:
        depths = [d for d in TABLE_DEPTHS if d <= self.settings.depth]
        conditions = []
        for condition in suite.conditions:
            by_drafter = {s.name: tallies[s.name, suite.name, condition.name].to_dict() for s in self.subjects}
            answers = [self.answers[prompt] for prompt in condition.prompts]
            conditions.append(
                {
                    "name": condition.name,
                    "note": condition.note,
                    "prompts": len(condition.prompts),
                    "prompt_tokens": sum(map(len, condition.prompts)) / len(condition.prompts),
                    "answer_tokens": sum(map(len, answers)) / len(answers),
                    "drafters": {name: without_heads(figures) for name, figures in by_drafter.items()},
                }
            )
        return _result(suite.name, suite.explanation, suite.baseline, depths, conditions)

    def _noise_suite(self, whole: dict[str, Tally], noisy: dict[tuple[str, float], Tally]) -> dict[str, Any]:
        depths = [d for d in TABLE_DEPTHS if d <= self.settings.depth]

        def condition(name: str, tallies: dict[str, Tally]) -> dict[str, Any]:
            return {"name": name, "note": "", "drafters": {n: without_heads(t.to_dict()) for n, t in tallies.items()}}

        conditions = [condition("no noise", whole)]
        for level in self.settings.noise:
            conditions.append(condition(f"α = {level:g}", {s.name: noisy[s.name, level] for s in self.subjects}))
        explanation = (
            "Gaussian noise of α times the state's own RMS on every state that enters a draft step (the fused state at first, "
            "then the fed-back ones); the context stays clean."
        )
        return _result("noise", explanation, "no noise", depths, conditions)

    def _depth_suite(self, whole: dict[str, Tally]) -> dict[str, Any]:
        depths = list(range(1, self.settings.probe_depth + 1))
        figures = {name: without_heads(tally.to_dict()) for name, tally in whole.items()}
        conditions = [{"name": "all prompts", "note": "", "drafters": figures}]
        explanation = "Drafting ever deeper, past the depth that a drafter was trained for."
        return _result("depth", explanation, None, depths, conditions)

    def _temperature_suite(self, prompts: Sequence[TokenIds]) -> dict[str, Any]:
        """Sampled acceptance has no short cut: the real engine, with rejection sampling."""
        settings, conditions = self.settings, []
        stats: dict[tuple[str, float], Any] = {}
        for subject in self.subjects:
            config = replace(self.config, kv_cache_tokens=0)
            engine = build_engine(self.decoder, Speculation(subject.network, settings.temperature_depth), config)
            for temperature in settings.temperatures:
                self.progress(f"sampling at temperature {temperature:g} with {subject.name}")
                params = SamplingParams(temperature=temperature, max_tokens=settings.max_tokens, seed=1234)
                requests = [engine.add_request(prompt, params) for prompt in prompts]
                while engine.has_unfinished():
                    engine.step()
                total = type(engine.stats).total(request.stats for request in requests)
                stats[subject.name, temperature] = total
            del engine
        for temperature in settings.temperatures:
            figures = {}
            for subject in self.subjects:
                total = stats[subject.name, temperature]
                lengths = {settings.temperature_depth: total.acceptance_length}
                figures[subject.name] = {**total.to_dict(), "acceptance_length": lengths}
            conditions.append({"name": f"T = {temperature:g}", "note": "", "prompts": len(prompts), "drafters": figures})
        baseline = conditions[0]["name"] if conditions else None
        explanation = "Sampling, measured with the serving engine and its rejection sampling."
        return _result("temperature", explanation, baseline, [settings.temperature_depth], conditions)


def _result(
    name: str, explanation: str, baseline: str | None, depths: list[int], conditions: list[dict[str, Any]]
) -> dict[str, Any]:
    """With each condition's acceptance length as a share of the baseline's (of the conditions' mean where there is none)."""
    for drafter in conditions[0]["drafters"] if conditions else ():
        lengths = {condition["name"]: condition["drafters"][drafter]["acceptance_length"] for condition in conditions}
        compared = [lengths[baseline]] if baseline in lengths else list(lengths.values())
        for condition in conditions:
            own = lengths[condition["name"]]
            mean = {depth: sum(one[depth] for one in compared) / len(compared) for depth in depths}
            condition["drafters"][drafter]["retention"] = {depth: own[depth] / mean[depth] for depth in depths}
    return {"name": name, "explanation": explanation, "baseline": baseline, "depths": depths, "conditions": conditions}


def without_heads(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures per head are kept for the probes over all prompts; for every condition they would drown the rest."""
    return {name: value for name, value in figures.items() if not name.endswith("_by_head")}


def _described(subject: Subject) -> dict[str, Any]:
    config = subject.network.config
    return {
        "name": subject.name,
        "version": config.version,
        "config": asdict(config),
        "parameters": subject.parameters,
    }


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
    on_progress: Progress = lambda _: None,
) -> dict[str, Any]:
    items = load_items(data, limit=settings.prompts_per_category)
    on_progress("loading the target")
    config = EngineConfig(device=device, dtype=dtype, max_model_len=max_model_len, max_num_seqs=32)
    engine = build_engine(model, Speculation("none"), config)
    decoder, tokenizer, config = engine.runner.decoder, engine.tokenizer, engine.config
    del engine
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
        "provenance": provenance([item.turns for item in items]),
    }


def load_subjects(names: Sequence[str], model: str, decoder: Decoder, config: EngineConfig) -> list[Subject]:
    subjects: list[Subject] = []
    for name in names:
        found = Speculation(name).resolve_drafter(model)
        if found is None or found == "ngram":
            raise ModelError(f"drafter {name!r} is no EAGLE drafter, so it has no states to look at; name a drafter's folder")
        network = load_drafter(found, decoder.config)
        size = sum(parameter.numel() for parameter in network.parameters())
        label = _label(Path(found), {subject.name for subject in subjects})
        subjects.append(Subject(label, fit(network, config), size))
    return subjects


def _label(folder: Path, taken: set[str]) -> str:
    """The folder's name, or as much more of its path as sets it apart."""
    label = folder.resolve().name
    for parent in folder.resolve().parents:
        if label not in taken:
            break
        label = f"{parent.name}/{label}"
    return label
