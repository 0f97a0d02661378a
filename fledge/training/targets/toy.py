"""A toy model for trying out training: a tiny target that learns a small made-up language in seconds, and its answers.

python -m fledge.training.targets.toy runs/toy      writes runs/toy/target and runs/toy/answers.jsonl
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from fledge.checkpoints.hf import save_decoder
from fledge.config import ModelConfig
from fledge.files import write_atomically
from fledge.models.decoder import Decoder
from fledge.training.data.packing import pack_texts
from fledge.training.targets.continuations import continuations
from fledge.training.ttt import document_starts, packed_attend, packed_mask

NUMBERS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
]
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
ANIMALS = ["fox", "owl", "hare", "crane", "otter", "wren", "seal", "moth", "newt", "stoat"]
ADJECTIVES = ["small", "grey", "quick", "old", "shy", "bright", "wild", "calm"]
PLACES = ["river", "hill", "barn", "lake", "wood", "field", "bridge", "mill"]
VERBS = ["walks", "runs", "looks", "flies", "crawls", "wanders"]
OTHERS = [
    *("<pad>", "<user>", "<bot>", "<end>", "count", "up", "down", "from", "to", "spell", "backwards", "tell", "about"),
    *("the", "then", "it", "and", "there", "rests", "."),
]
WORDS = list(dict.fromkeys([*OTHERS, *NUMBERS, *LETTERS, *ANIMALS, *ADJECTIVES, *PLACES, *VERBS]))
IDS = {word: number for number, word in enumerate(WORDS)}
PAD, END = IDS["<pad>"], IDS["<end>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<user> ' + message['content'] + ' <bot> ' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + ' <end> ' }}"
    "{% else %}{{ raise_exception('the toy knows users and their bot alone') }}{% endif %}{% endfor %}"
)

TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=len(WORDS),
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    windows=(None,) * 4,
    eos_token_ids=(END,),
    tie_embeddings=True,
)


def conversation(draw: random.Random) -> tuple[list[int], list[int]]:
    """Draws a (prompt, answer) of the made-up language: counting, spelling, or a story with random choices."""
    kind = draw.choice(["count", "spell", "story", "story"])
    if kind == "count":
        low, high = sorted(draw.sample(range(21), 2))
        up = draw.random() < 0.5
        first, last, words = (low, high, NUMBERS[low : high + 1]) if up else (high, low, NUMBERS[low : high + 1][::-1])
        prompt = ["count", "up" if up else "down", "from", NUMBERS[first], "to", NUMBERS[last]]
        answer = words
    elif kind == "spell":
        word = draw.choice(ANIMALS + ADJECTIVES + PLACES)
        back = draw.random() < 0.5
        prompt = ["spell", word, *(["backwards"] if back else [])]
        answer = list(word[::-1] if back else word)
    else:
        animal, adjective = draw.choice(ANIMALS), draw.choice(ADJECTIVES)
        prompt = ["tell", "about", "the", adjective, animal]
        answer = []
        for place in draw.sample(PLACES, draw.randint(2, 4)):
            answer += ["the", adjective, animal, draw.choice(VERBS), "to", "the", place, "and", "rests", "there", "."]
            answer += ["then", "it", draw.choice(VERBS), "from", "the", place, "."]
    return [IDS[w] for w in ["<user>", *prompt, "<bot>"]], [IDS[w] for w in [*answer, "<end>"]]


def learned_target(steps: int = 300, seed: int = 0) -> Decoder:
    """Trains a decoder on the language; takes about 10 seconds on one core."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    decoder = Decoder(TARGET)
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=4e-3, betas=(0.9, 0.95))
    rows, length = 8, 128
    decoder.reserve(length)
    for step in range(steps):
        texts: list[list[int]] = []
        packed: list[list[int]] = []
        for _ in range(rows):
            packed.append([])
            left = length
            while len(text := [token for part in conversation(draw) for token in part]) <= left:
                packed[-1].append(len(texts))
                texts.append(text)
                left -= len(text)
        tokens, document = pack_texts(texts, packed, length)
        start = document_starts(document)
        attend = packed_attend({None: packed_mask(start, flex=False)}, length)
        positions = torch.arange(length) - start
        hidden = decoder(tokens.flatten(), positions.flatten(), attend, highest_position=0).hidden_ND
        labels = tokens.roll(-1, 1).masked_fill((document.roll(-1, 1) != document) | (document == 0), -100)
        loss = F.cross_entropy(decoder.logits(hidden), labels.flatten())
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
    return decoder.eval().requires_grad_(False)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<bot>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))


def make(folder: str | Path, num_answers: int = 2000, seed: int = 0, steps: int = 300) -> Path:
    """Makes target and answers, unless both exist."""
    folder = Path(folder)
    target, answers = folder / "target", folder / "answers.jsonl"
    if answers.is_file() and (target / "config.json").is_file():
        return folder
    decoder = learned_target(steps, seed)
    shutil.rmtree(target, ignore_errors=True)
    save_decoder(decoder, target)
    save_tokenizer(target)
    draw, generator = random.Random(seed + 1), torch.Generator().manual_seed(seed)
    prompts = [conversation(draw)[0] for _ in range(num_answers)]
    lines = []
    for first in range(0, num_answers, 500):
        some = prompts[first : first + 500]
        for prompt, answer in zip(some, continuations(decoder, some, 96, [END], generator), strict=True):
            lines.append(json.dumps({"prompt_ids": prompt, "answer_ids": answer}))
    write_atomically(answers, lambda file: file.write(("\n".join(lines) + "\n").encode()))
    return folder


if __name__ == "__main__":
    print(make(sys.argv[1] if len(sys.argv) > 1 else "runs/toy"))
