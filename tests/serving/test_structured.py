"""Grammars are enforced at every position, and answers with and without speculation are the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.errors import RequestError
from fledge.sampling import SamplingParams
from fledge.serving.structured import GrammarCompiler, GrammarProcessor
from fledge.speculation.depth import TreeShape
from fledge.tokenizer import Tokenizer
from tests.serving.model_folder import make_tokenizer
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

END = 2
# Repetitive, so that n-gram drafts are accepted, and ends at a length that drafts exceed.
COLOURS = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 12, "maxItems": 12}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [END])


def engine_with(tokenizer: Tokenizer, drafter: str) -> Engine:
    decoder = tiny_decoder(vocab_size=tokenizer.vocab_size, eos_token_ids=(END,))
    speculation = Speculation(None if drafter == "none" else drafter, 4)
    if drafter in ("chain", "tree"):
        network = tiny_drafter(tiny_drafter_config(decoder.config))
        speculation = Speculation(network, 4, TreeShape(3, 10) if drafter == "tree" else None)
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=4, kv_cache_tokens=2048, threads=1)
    return build_engine(decoder, speculation.fixed_depth(), config, tokenizer=tokenizer)


def answer(engine: Engine, compiler: GrammarCompiler, grammar, **params) -> Request:
    settings = {"max_tokens": 150, "temperature": 0.0} | params
    params = SamplingParams(**settings, logits_processors=[compiler.processor(grammar)])
    request = engine.add_request([5, 6, 7, 8], params)
    while not request.finished:
        engine.step()
    engine.check_integrity()
    return request


@pytest.mark.parametrize("schema", [COLOURS, PERSON])
@pytest.mark.parametrize("drafter", ["ngram", "chain", "tree"])
def test_speculation_keeps_the_answer(tokenizer: Tokenizer, compiler: GrammarCompiler, drafter: str, schema: dict) -> None:
    grammar = compiler.json_schema(schema)
    plain = answer(engine_with(tokenizer, "none"), compiler, grammar)
    speculative = answer(engine_with(tokenizer, drafter), compiler, grammar)
    assert speculative.answer == plain.answer
    assert plain.finish_reason == "stop"
    value = json.loads(plain.text)
    assert len(value) == 12 if schema is COLOURS else set(value) == {"name", "age"}
    if drafter == "ngram" and schema is COLOURS:
        assert speculative.stats.accepted > 20
    if drafter != "ngram":
        assert speculative.stats.drafted > 0


@pytest.mark.parametrize("drafter", ["none", "ngram", "tree"])
def test_samples_obey_the_grammar(tokenizer: Tokenizer, compiler: GrammarCompiler, drafter: str) -> None:
    engine, grammar = engine_with(tokenizer, drafter), compiler.json_schema(PERSON)
    for seed in range(5):
        value = json.loads(answer(engine, compiler, grammar, temperature=2.0, seed=seed).text)
        assert 0 <= value["age"] <= 120
        assert len(value["name"]) <= 8


def allowed(processor: GrammarProcessor, tokens: Sequence[int], size: int) -> list[int]:
    return torch.isfinite(processor(tokens, torch.zeros(size))).nonzero().flatten().tolist()


def test_the_matcher_follows_any_order_of_positions(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Masks depend only on the tokens and not on earlier calls, when the processor goes forward, back or to another branch."""
    grammar = compiler.json_schema(PERSON)
    text = tokenizer.encode('{"name": "Ann", "age": 34}', add_special_tokens=False)
    other = tokenizer.encode('{"name": "Bo"', add_special_tokens=False)
    walks = [text[:3], text[:9], text[:4], other, text, [*text, END], text[:2], [], other[:5], [*text, END, 7], text[:6]]
    followed = compiler.processor(grammar)
    for walk in walks:
        fresh = compiler.processor(grammar)
        assert allowed(followed, walk, tokenizer.vocab_size) == allowed(fresh, walk, tokenizer.vocab_size), walk
    assert allowed(followed, text, tokenizer.vocab_size) == [END]


def test_an_answer_ends_even_if_end_tokens_are_banned(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    request = answer(engine_with(tokenizer, "none"), compiler, compiler.choice(["cat"]), min_tokens=20)
    assert request.text.startswith("cat")


def test_choice_regex_and_ebnf(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    engine = engine_with(tokenizer, "ngram")
    assert answer(engine, compiler, compiler.choice(["yes", 'n"o'])).text in ("yes", 'n"o')
    digits = answer(engine, compiler, compiler.regex(r"[0-9]{4}-[0-9]{2}")).text
    assert len(digits) == 7
    assert digits[4] == "-"
    assert answer(engine, compiler, compiler.ebnf('root ::= "a" "b" | "c"')).text in ("ab", "c")


def test_a_grammar_can_start_after_the_end_of_reasoning(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    mark = 9
    processor = compiler.processor(compiler.choice(["cat"]), [mark])
    assert len(allowed(processor, [4, 5], tokenizer.vocab_size)) == tokenizer.vocab_size
    after = allowed(processor, [4, 5, mark], tokenizer.vocab_size)
    assert all("cat".startswith(tokenizer.decode([token])) for token in after)


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, False, {"enum": []}, {"pattern": "((", "type": "string"}]
)
def test_an_invalid_schema_is_refused(compiler: GrammarCompiler, schema: dict) -> None:
    with pytest.raises(RequestError, match="JSON schema") as caught:
        compiler.json_schema(schema)
    assert ".cc" not in str(caught.value)


def test_a_huge_schema_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="characters"):
        compiler.json_schema({"enum": ["x" * (64 << 10)]})


def test_a_single_slow_mask_ends_no_answer(compiler, monkeypatch):
    """It may be a garbage collection on this thread. A grammar whose masks are slow has a second one."""
    seconds = iter([1.0, 0.0, 0.0, 1.0])
    processor = compiler.processor(compiler.json_object())
    monkeypatch.setattr(processor, "_mask_after", lambda tokens: (False, next(seconds)))
    failures = []
    for _ in range(4):
        processor._fill_bitmask([])
        failures.append(processor.failure is not None)
    assert failures == [False, False, False, True]
