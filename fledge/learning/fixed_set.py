"""The fixed set: the target's answers to prompts that are not traffic. Half is replayed in training, half used by the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fledge.bench.datasets import load_items
from fledge.drift.metrics import Count, acceptance_length
from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.learning.config import LearnConfig
from fledge.learning.samples import LEAST_ANSWER, Sample
from fledge.sampling import SamplingParams

BUILT_IN = Path(__file__).with_name("fixed_prompts.txt")  # one prompt per line, of mixed kinds


@dataclass
class FixedSet:
    """Texts on which new generations must not get worse."""

    replay: list[Sample] = field(default_factory=list)
    judged: list[Sample] = field(default_factory=list)
    counts: dict[int, dict[Sample, Count]] = field(default_factory=dict)  # of the `judged` samples, by generation

    @classmethod
    def of(cls, texts: Sequence[Sample]) -> FixedSet:
        return cls(list(texts[::2]), list(texts[1::2]))

    def baseline(self, serving: int) -> list[Count]:
        """Returns the counts to compare a candidate with: of the first or the serving generation, whichever accepts more."""
        known = [list(self.counts[one].values()) for one in (0, serving) if one in self.counts]
        return max(known, key=lambda counts: acceptance_length(counts).value, default=[])

    def keep(self, counts: dict[Sample, Count], serving: int) -> None:
        """Stores the counts of the serving generation. Of the others, only those of the first generation are kept."""
        self.counts = {one: known for one, known in self.counts.items() if one == 0} | {serving: counts}


def answer(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Sample]:
    """Generates the target's greedy answers with the engine itself, before it serves."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    hook, engine.hook = engine.hook, None
    requests: list[Request] = []
    try:
        for prompt in prompts:
            requests.append(engine.add_request(prompt, params, learn=False))
        while engine.has_unfinished():
            engine.step()
    finally:
        engine.hook = hook
        for request in requests:
            engine.abort(request)  # only has an effect on requests left over after an error
    return [Sample(request.tokens, len(request.prompt)) for request in requests if request.num_answer >= LEAST_ANSWER]


def prompts_of(engine: Engine, learn: LearnConfig) -> list[list[int]]:
    """Returns single questions, rendered with the chat template: those of `learn.replay`, or the built-in ones."""
    if (tokenizer := engine.tokenizer) is None:
        return []
    if learn.replay is None:
        texts = BUILT_IN.read_text(encoding="utf-8").splitlines()
    else:
        texts = [item.turns[0] for item in load_items(learn.replay)]
        texts = texts[:: max(1, len(texts) // learn.fixed_texts)]  # spread over the whole file
    prompts: list[list[int]] = []
    for text in texts:
        if tokenizer.has_chat_template:
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        else:
            prompt = tokenizer.encode(text)
        if len(prompt) + learn.fixed_tokens <= min(learn.sample_tokens, engine.config.max_model_len):
            prompts.append(prompt)
        if len(prompts) == learn.fixed_texts:
            break
    return prompts
