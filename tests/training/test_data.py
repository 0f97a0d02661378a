"""Training data: reading chats, the loss mask, augmentation, filtering and the cache."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from fledge.errors import UserError
from fledge.training.data.chat_files import Conversation, DataError, Decontamination, TokenTurn, read_conversations
from fledge.training.data.loading import SampleWork, load_samples, tokenize_conversation
from fledge.training.data.packing import PackedLoader
from fledge.training.data.rendering import ChatFormat
from fledge.training.data.samples import Sample, SampleSet
from fledge.training.data.templates import NO_TEMPLATE, SYSTEM_PROMPTS, TEXT_TEMPLATES, Augmentation
from tests.training.chat import (
    ALWAYS_THINKING,
    CHATML,
    INSTRUCT,
    QWEN3,
    STRIPPING,
    TOOLS,
    assistant,
    chat_tokenizer,
    system,
    user,
)

TWO_TURNS = (user("Hi"), assistant("Hello!"), user("How are you?"), assistant("I am fine."))


def learnt(sample: Sample, tokenizer) -> list[str]:
    return [tokenizer.decode(sample.tokens[a:b], skip_special_tokens=False) for a, b in sample.answers()]


def text_of(sample: Sample, tokenizer) -> str:
    return tokenizer.decode(sample.tokens, skip_special_tokens=False)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- the loss mask ----------------------------------------------------------------------------------------------


def test_loss_on_every_answer_and_its_end_of_turn():
    tokenizer = chat_tokenizer()
    sample = tokenize_conversation(Conversation(TWO_TURNS), ChatFormat(tokenizer))
    assert learnt(sample, tokenizer) == ["Hello!<|im_end|>", "I am fine.<|im_end|>"]
    # The sample has all tokens of the conversation, with the default system prompt and the same ids as in serving.
    rendered = tokenizer.apply_chat_template(TWO_TURNS, add_generation_prompt=False)
    assert sample.tokens.tolist() == rendered[: len(sample)]
    assert text_of(sample, tokenizer).startswith("<|im_start|>system\nYou are a helpful assistant<|im_end|>")
    assert sample.tokens.dtype == np.int32
    assert sample.loss_mask.dtype == bool


def test_prompt_before_answer_equals_serving_prompt():
    tokenizer = chat_tokenizer()
    sample = tokenize_conversation(Conversation(TWO_TURNS), ChatFormat(tokenizer))
    for turn, (start, _) in enumerate(sample.answers()):
        prompt = tokenizer.apply_chat_template(TWO_TURNS[: 2 * turn + 1], add_generation_prompt=True)
        assert sample.tokens[:start].tolist() == prompt


def test_answers_that_repeat_the_template_or_the_user_are_found():
    tokenizer = chat_tokenizer()
    messages = (user("assistant"), assistant("assistant"), user("a"), assistant("user\n"), user("x"), assistant("a"))
    sample = tokenize_conversation(Conversation(messages), ChatFormat(tokenizer))
    assert learnt(sample, tokenizer) == ["assistant<|im_end|>", "user\n<|im_end|>", "a<|im_end|>"]


def test_template_that_strips():
    tokenizer = chat_tokenizer(STRIPPING)
    messages = (system(" Be kind. "), user(" Hi\n"), assistant("\n Hello! \n"), user("Bye"), assistant(" Bye! "))
    sample = tokenize_conversation(Conversation(messages), ChatFormat(tokenizer))
    assert learnt(sample, tokenizer) == ["Hello!<|im_end|>", "Bye!<|im_end|>"]


def test_template_without_generation_prompt_leaves_the_space_to_the_model():
    tokenizer = chat_tokenizer(INSTRUCT)
    sample = tokenize_conversation(Conversation(TWO_TURNS), ChatFormat(tokenizer))
    assert learnt(sample, tokenizer) == [" Hello!<|im_end|>", " I am fine.<|im_end|>"]
    prompt = tokenizer.apply_chat_template(TWO_TURNS[:1], add_generation_prompt=True)
    assert sample.tokens[: len(prompt)].tolist() == prompt


THOUGHT = "<think>\nso\n</think>\n\n"


def test_reasoning_has_loss_where_the_template_keeps_it():
    """Chat files have reasoning inside the content. The template drops it from earlier turns: those answers have no loss."""
    tokenizer = chat_tokenizer(QWEN3)
    messages = (user("Hi"), assistant(THOUGHT + "Hello!"), user("Why?"), assistant(THOUGHT + "Because."))
    sample = tokenize_conversation(Conversation(messages), ChatFormat(tokenizer))
    assert learnt(sample, tokenizer) == [THOUGHT + "Because.<|im_end|>"]
    assert text_of(sample, tokenizer).count("so") == 1
    assert "Hello!" in text_of(sample, tokenizer)
    sample = tokenize_conversation(Conversation((*messages[:3], assistant("Because."))), ChatFormat(tokenizer))
    assert learnt(sample, tokenizer) == ["Because.<|im_end|>"]  # the template adds the empty <think> block before it


def test_reasoning_of_the_last_answer_has_loss():
    messages = (user("Hi"), assistant(THOUGHT + "Hello!"))
    plain = tokenize_conversation(Conversation(messages), ChatFormat(chat_tokenizer()))
    assert learnt(plain, chat_tokenizer()) == [THOUGHT + "Hello!<|im_end|>"]
    tokenizer = chat_tokenizer(ALWAYS_THINKING)  # the prompt opens the <think> block, and past answers lose theirs
    sample = tokenize_conversation(Conversation(messages), ChatFormat(tokenizer))
    assert learnt(sample, tokenizer) == ["so\n</think>\n\nHello!<|im_end|>"]
    assert text_of(sample, tokenizer).endswith("assistant\n" + THOUGHT + "Hello!<|im_end|>")


def written(tokenizer, answer: str, *, thinks: bool = True, ends: bool = True) -> Conversation:
    """A conversation as `fledge regenerate` writes it: text, and the ids that the target read and generated."""
    options = {"enable_thinking": thinks}
    prompt = tokenizer.apply_chat_template([user("Hi")], **options)
    ids = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_ids[0]] * ends
    return Conversation((user("Hi"), assistant(answer)), (TokenTurn(prompt, ids),), "file", options)


@pytest.mark.parametrize("template", [QWEN3, ALWAYS_THINKING])
@pytest.mark.parametrize("choice", [{"system_probability": 1.0}, {"template_probability": 1.0}], ids=["system", "template"])
def test_augmentation_keeps_reasoning_whole(template, choice):
    tokenizer = chat_tokenizer(template)
    opened = template == ALWAYS_THINKING
    thought = THOUGHT.removeprefix("<think>\n") if opened else THOUGHT
    conversations = {
        "whole": written(tokenizer, thought + "Hello!"),
        "cut off": written(tokenizer, thought.partition("so")[0] + "so, let me", ends=False),
    }
    if not opened:
        conversations["off"] = written(tokenizer, "Hello!", thinks=False)
    for name, one in conversations.items():
        work = SampleWork(tokenizer, None, None, "truncate", Augmentation(**choice), False, None, Decontamination(()))
        samples, report = work.samples([one])
        (turn,) = one.turns
        assert learnt(samples[0], tokenizer) == [tokenizer.decode(turn.answer_ids, skip_special_tokens=False)], name
        changes = name == "off" or (name == "whole" and not (opened and "template_probability" in choice))
        assert (report.augmented, report.not_augmented) == (int(changes), int(not changes)), name
        text = text_of(samples[0], tokenizer)
        assert text.count("<think>") == text.count("</think>") + (name == "cut off"), text


def test_another_chat_template_can_be_given():
    tokenizer = chat_tokenizer()
    sample = tokenize_conversation(Conversation(TWO_TURNS), ChatFormat(tokenizer, INSTRUCT))
    assert text_of(sample, tokenizer).startswith("[INST] Hi [/INST] Hello!<|im_end|>")


def test_exact_ids_are_kept_and_a_cut_off_answer_has_no_end():
    tokenizer = chat_tokenizer()
    end = tokenizer.eos_token_ids[0]
    odd = [70, 71, 72]  # ids that the tokenizer does not produce for this text
    turns = (TokenTurn([5, 6], [*odd, end]), TokenTurn([5, 6, *odd, end, 9], [80, 81]))
    sample = tokenize_conversation(Conversation(TWO_TURNS, turns), ChatFormat(tokenizer))
    assert sample.tokens.tolist() == [5, 6, *odd, end, 9, 80, 81]
    assert sample.loss_mask.tolist() == [False, False, True, True, True, True, False, True, True]
    # With another template the context changes, and the answers keep their ids.
    rendered = tokenize_conversation(Conversation(TWO_TURNS, turns), ChatFormat(tokenizer, CHATML))
    spans = [rendered.tokens[a:b].tolist() for a, b in rendered.answers()]
    assert spans == [[*odd, end], [80, 81]]
    assert (rendered.tokens == end).sum() == 4  # system, user, answer, user; none after the cut-off answer


# --- reading ----------------------------------------------------------------------------------------------------


def test_reads_openai_sharegpt_and_token_lines(tmp_path):
    path = tmp_path / "chats.jsonl.gz"
    sharegpt = [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, assistant("Hello!")]
    lines = [{"messages": parts}, {"conversations": sharegpt}, {"prompt_ids": [1, 2], "answer_ids": [3]}]
    with gzip.open(path, "wt") as file:
        file.write("\n\n".join(map(json.dumps, lines)))
    openai, share, tokens = read_conversations(path)
    assert openai.messages == (user("Hi"), assistant("Hello!"))
    assert share.messages == (system("S"), user("Hi"), assistant("Hello!"))
    assert tokens.turns == (TokenTurn([1, 2], [3]),)


def test_turns_with_rewritten_prompts_become_separate_samples(tmp_path):
    turns = [{"prompt_ids": [1], "answer_ids": [2]}, {"prompt_ids": [1, 2, 3], "answer_ids": [4]}]
    rewritten = {"prompt_ids": [1, 9, 3, 4, 5], "answer_ids": [6]}
    messages = [*TWO_TURNS, user("More"), assistant("No.")]
    path = write(tmp_path / "a.jsonl", {"messages": messages, "turns_ids": [*turns, rewritten]})
    first, second = read_conversations(path)
    assert len(first.turns) == 2
    assert first.messages == TWO_TURNS
    assert second.turns == (TokenTurn([1, 9, 3, 4, 5], [6]),)
    # Under another template only the last answer of the second has a loss.
    tokenizer = chat_tokenizer()
    sample = tokenize_conversation(second, ChatFormat(tokenizer, CHATML))
    assert [sample.tokens[a:b].tolist() for a, b in sample.answers()] == [[6]]
    assert "I am fine." in text_of(sample, tokenizer)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"text": "x"}', "'text'"),
        ('{"messages": "x"}', "must be a list"),
        ('{"messages": [{"content": "x"}]}', '"role"'),
        ('{"messages": [{"role": "user", "content": 3}]}', "not text"),
        ('{"conversations": [{"from": "parrot", "value": "x"}]}', "parrot"),
        ('{"prompt_ids": [1], "answer_ids": ["x"]}', "answer_ids"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "turns_ids": []}', "turns_ids"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, complaint):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": list(TWO_TURNS)}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"chats\.jsonl, line 2") as raised:
        list(read_conversations(path))
    assert complaint in str(raised.value)


def test_missing_file_and_torn_gzip(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        list(read_conversations(tmp_path / "none.jsonl"))
    path = tmp_path / "torn.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"messages": list(TWO_TURNS)}).encode())[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        list(read_conversations(path))


# --- the data set -----------------------------------------------------------------------------------------------


def test_report_counts_everything_that_is_not_kept(tmp_path):
    loop = assistant("and so on " * 60)
    path = write(
        tmp_path / "a.jsonl",
        {"messages": TWO_TURNS},
        {"messages": [user("Loop!"), loop]},
        {"messages": [user("Hi"), assistant("Hello!"), user("Loop!"), loop, user("Stop"), assistant("Fine.")]},
        {"messages": [user("no answer")]},
        {"messages": [user("Hi"), assistant(" ".join(str(n) for n in range(200)))]},
    )
    tokenizer = chat_tokenizer()
    samples, report = load_samples(path, tokenizer, max_length=200, long="drop")
    assert (report.conversations, report.kept, report.looping, report.empty, report.too_long_dropped) == (5, 2, 2, 1, 1)
    assert learnt(samples[1], tokenizer) == ["Hello!<|im_end|>"]  # truncated before the loop
    assert report.tokens == sum(map(len, samples))
    assert report.answer_tokens == samples.loss_mask.sum()
    for words in ("2 of 5", "2 looping", "1 empty", "1 dropped as too long (conversation or prompt)"):
        assert words in str(report)
    cut, report = load_samples(path, tokenizer, max_length=200)
    assert (len(cut), report.truncated, len(cut[2])) == (3, 1, 200)
    whole, _ = load_samples(path, tokenizer)
    assert report.truncated_tokens == int(whole.loss_mask.sum() - cut.loss_mask.sum()) > 0
    assert f"1 too long, truncated ({report.truncated_tokens:,} answer tokens lost)" in str(report)


def test_a_long_sample_keeps_its_prompt_and_a_prompt_too_long_is_dropped(tmp_path):
    """Text after the truncation is not trained on: the target never saw it without its prompt."""
    words = " ".join(str(n) for n in range(200))
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [user("Count."), assistant(words)]},
        {"messages": [user(words), assistant("Why?")]},
    )
    tokenizer = chat_tokenizer()
    samples, report = load_samples(path, tokenizer, max_length=100)
    whole, _ = load_samples(path, tokenizer)
    assert (len(samples), report.truncated, report.too_long_dropped) == (1, 1, 1)
    assert samples[0].tokens.tolist() == whole[0].tokens[:100].tolist()
    batch = next(PackedLoader(samples, sequence_length=100, micro_batch_size=1, seed=0))
    assert batch.positions[0].tolist() == list(range(100))


def test_refusals_of_the_template_are_counted_and_an_empty_data_set_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [system("S"), *TWO_TURNS]})
    with pytest.raises(DataError, match=r"no sample is left.*1 refused.*line 1.*no system prompts"):
        load_samples(path, chat_tokenizer(INSTRUCT))


def test_invalid_or_unused_chat_template_is_reported(tmp_path):
    path = write(tmp_path / "ids.jsonl", {"prompt_ids": [5, 6], "answer_ids": [7, 8]}, {"messages": TWO_TURNS})
    with pytest.raises(UserError, match=r"^data\.chat_template cannot be used: .*[Ee]xpected"):
        load_samples(path, chat_tokenizer(), chat_template="{% if %}")
    _, report = load_samples(path, chat_tokenizer(), chat_template=INSTRUCT)
    assert "1 with token ids only, unaffected by data.chat_template" in str(report)
    _, report = load_samples(path, chat_tokenizer())
    assert "chat_template" not in str(report)


def test_ids_of_another_model_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt_ids": [1, 2], "answer_ids": [99999]})
    with pytest.raises(DataError, match="99999"):
        load_samples(path, chat_tokenizer())


def test_cache_is_used_and_depends_on_its_input(tmp_path):
    tokenizer, cache = chat_tokenizer(), tmp_path / "cache"
    path = write(tmp_path / "a.jsonl", {"messages": TWO_TURNS})
    first, report = load_samples(path, tokenizer, cache_dir=cache)
    (entry,) = cache.iterdir()
    again, report_again = load_samples(path, tokenizer, cache_dir=cache)
    assert report_again == report
    assert np.array_equal(again.tokens, first.tokens)
    # Shows that the cache is read: changed content of the entry is returned.
    SampleSet.from_samples([Sample(np.array([1, 2], np.int32), np.array([False, True]))]).save(entry, kept=7)
    tampered, report = load_samples(path, tokenizer, cache_dir=cache)
    assert (len(tampered.tokens), report.kept) == (2, 7)
    # Other data, another template, length or augmentation each make a new entry.
    write(path, {"messages": TWO_TURNS}, {"messages": TWO_TURNS})
    load_samples(path, tokenizer, cache_dir=cache)
    load_samples(path, tokenizer, cache_dir=cache, chat_template=INSTRUCT)
    load_samples(path, tokenizer, cache_dir=cache, max_length=1000)
    load_samples(path, tokenizer, cache_dir=cache, augmentation=Augmentation(system_probability=1.0))
    assert len(list(cache.glob("*.npz"))) == 5


def test_split_is_disjoint_and_repeatable():
    samples = SampleSet.from_samples([Sample(np.array([n, n], np.int32), np.array([False, True])) for n in range(20)])
    train, held_out = samples.split(5, seed=3)
    assert sorted([*train.tokens[::2], *held_out.tokens[::2]]) == list(range(20))
    assert held_out.tokens.tolist() == samples.split(5, seed=3)[1].tokens.tolist()
    assert held_out[0].prompt.tolist() == [held_out.tokens[0]]


@pytest.mark.parametrize("processes", [0, 2])
def test_no_prompt_is_both_trained_on_and_held_out(tmp_path, processes):
    """Three files have different answers to the same prompts; augmentation varies templates and system prompts."""
    names = [f"{a}{b}" for a in "abcdef" for b in "uvwxyz"]
    files = [
        write(
            tmp_path / f"{answer}.jsonl",
            *(
                {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{answer} {n}"}]}
                for n in names
            ),
        )
        for answer in ("one", "two", "three")
    ]
    tokenizer = chat_tokenizer()
    augmentation = Augmentation(template_probability=0.5, system_probability=0.5)
    samples, report = load_samples(files, tokenizer, augmentation=augmentation, processes=processes)
    assert report.augmented > 20
    assert (len(samples), samples.num_prompts) == (108, 36)
    train, held_out = samples.split(8, seed=1)

    def asked(part: SampleSet) -> set[str]:
        texts = [tokenizer.decode(sample.prompt) for sample in part]
        return {name for name in names for text in texts if f"is {name}?" in text}

    assert len(asked(held_out)) == held_out.num_prompts == len(held_out.first_of_each_prompt()) == 8
    assert len(held_out) == 24
    assert asked(train) == set(names) - asked(held_out)


def test_split_of_distinct_prompts_is_unchanged():
    """Same split as when samples were drawn one at a time, so that runs started with earlier versions can be resumed."""
    samples = SampleSet.from_samples([Sample(np.array([n, n], np.int32), np.array([False, True])) for n in range(50)])
    order = np.random.default_rng(7).permutation(50)
    train, held_out = samples.split(9, seed=7)
    assert held_out.tokens[::2].tolist() == sorted(order[:9])
    assert train.tokens[::2].tolist() == sorted(order[9:])


# --- augmentation -----------------------------------------------------------------------------------------------


def test_augmentation_changes_the_context_and_keeps_the_answers(tmp_path):
    tokenizer = chat_tokenizer()
    end = tokenizer.eos_token_ids[0]
    answer = [*tokenizer.encode("I am fine."), end]
    turn = {"prompt_ids": tokenizer.apply_chat_template([user("How are you?")]), "answer_ids": answer}
    line = {"messages": [user("How are you?"), assistant("I am fine.")], "turns_ids": [turn]}
    path = write(tmp_path / "a.jsonl", *[line] * 60)
    augmentation = Augmentation(template_probability=0.5, no_template_probability=0.2, system_probability=0.5)
    samples, report = load_samples(path, tokenizer, augmentation=augmentation)
    contexts = set()
    for sample in samples:
        ((start, stop),) = sample.answers()
        assert sample.tokens[start:stop].tolist() == answer
        contexts.add(tokenizer.decode(sample.tokens[:start], skip_special_tokens=False))
    assert len(contexts) > 20
    assert 40 <= report.augmented < 60
    assert any("### Instruction" in context for context in contexts)
    assert "How are you?\n\n" in contexts  # no template
    again, _ = load_samples(path, tokenizer, augmentation=augmentation)
    assert np.array_equal(again.tokens, samples.tokens)
    other, _ = load_samples(path, tokenizer, augmentation=Augmentation(0.5, 0.2, 0.5, seed=1))
    assert not np.array_equal(other.tokens, samples.tokens)


@pytest.mark.parametrize("template", [*TEXT_TEMPLATES.values(), NO_TEMPLATE], ids=[*TEXT_TEMPLATES, "none"])
def test_every_text_template_marks_multi_turn_answers(template, monkeypatch, tmp_path):
    tokenizer = chat_tokenizer()
    monkeypatch.setitem(TEXT_TEMPLATES, "alpaca", template)
    path = write(tmp_path / "a.jsonl", {"messages": TWO_TURNS})
    augmentation = Augmentation(template_probability=1.0, system_probability=1.0, templates=("alpaca",))
    samples, _ = load_samples(path, tokenizer, augmentation=augmentation)
    assert learnt(samples[0], tokenizer) == ["Hello!<|im_end|>", "I am fine.<|im_end|>"]
    text = text_of(samples[0], tokenizer)
    assert "Hi" in text
    assert "How are you?" in text
    assert any(prompt in text for prompt in SYSTEM_PROMPTS) == bool(template.system)


def test_samples_that_cannot_be_augmented_are_kept_and_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": TWO_TURNS}, {"prompt_ids": [5], "answer_ids": [6]})
    samples, report = load_samples(path, chat_tokenizer(INSTRUCT), augmentation=Augmentation(system_probability=1.0))
    assert (len(samples), report.augmented, report.not_augmented) == (2, 0, 2)


def test_invalid_augmentation_is_refused():
    with pytest.raises(ValueError, match="template_probability"):
        Augmentation(template_probability=1.5)
    with pytest.raises(ValueError, match="add up"):
        Augmentation(template_probability=0.7, no_template_probability=0.7)
    with pytest.raises(ValueError, match="mustard"):
        Augmentation(templates=("mustard",))
    assert len(set(SYSTEM_PROMPTS)) == len(SYSTEM_PROMPTS) >= 40


def test_text_before_a_loop_is_kept(tmp_path):
    tokenizer = chat_tokenizer()
    before = "What is two plus three? Five. How are you? I am fine, thank you! The quick brown fox jumps over the lazy dog."
    looping = assistant(before + " and so on" * 60)
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [user("Hi"), looping, user("Stop"), assistant("Fine.")]}) + "\n")
    samples, report = load_samples([path], tokenizer, max_length=2048)
    (text,) = learnt(samples[0], tokenizer)
    assert text.startswith(before)
    assert text.count("and so on") <= 2
    assert report.looping == 1


# --- tools and reasoning ----------------------------------------------------------------------------------------

WEATHER = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL_CHAT = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
    "messages": [
        user("How is Oslo?"),
        {"role": "assistant", "content": None, "reasoning_content": "I should look.", "tool_calls": [WEATHER]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "So it rains."},
    ],
}


def test_tool_calls_and_reasoning_are_learnt(tmp_path):
    tokenizer = chat_tokenizer(TOOLS)
    later = [*TOOL_CHAT["messages"], user("Thanks."), assistant("Bye.")]
    path = write(tmp_path / "a.jsonl", TOOL_CHAT, {**TOOL_CHAT, "messages": later})
    samples, report = load_samples(path, tokenizer)
    assert report.kept == 2
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
    assert learnt(samples[0], tokenizer) == [
        "<think>\nI should look.\n</think>\n\n" + call,
        "<think>\nSo it rains.\n</think>\n\nIt rains.<|im_end|>",
    ]
    assert "Tools: " in text_of(samples[0], tokenizer)
    # The template drops the reasoning of earlier turns, so those answers are no longer what the target wrote.
    assert learnt(samples[1], tokenizer) == ["Bye.<|im_end|>"]
    assert "weather" in text_of(samples[1], tokenizer)
    assert "I should look" not in text_of(samples[1], tokenizer)


def test_template_without_tools_is_reported(tmp_path):
    path = write(tmp_path / "a.jsonl", {**TOOL_CHAT, "messages": TOOL_CHAT["messages"][:2]}, {"messages": TWO_TURNS})
    _, report = load_samples(path, chat_tokenizer())
    assert (report.kept, report.refused) == (1, 1)
    assert "leaves out the reasoning or the tool calls" in str(report)


def test_other_templates_are_not_tried_on_tool_calls(tmp_path):
    path = write(tmp_path / "a.jsonl", {**TOOL_CHAT, "messages": TOOL_CHAT["messages"][:2]})
    _, report = load_samples(path, chat_tokenizer(TOOLS), augmentation=Augmentation(template_probability=1.0))
    assert (report.kept, report.not_augmented) == (1, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "x"}]}]}, "each of the tool_calls needs"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": 3}]}, "reasoning_content is not text"),
        ({"messages": [user("Hi")], "tools": "none"}, "tools must be a list"),
        (
            {"messages": [user("Hi")], "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs may not set 'chat_template'",
        ),
    ],
)
def test_wrong_tool_calls_are_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", line)
    with pytest.raises(DataError, match="line 1: " + message):
        list(read_conversations(path))
