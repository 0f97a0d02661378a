"""Tiny model folders for real vLLM: its CPU attention needs heads of 32, its loader needs a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from fledge.checkpoints.hf import save_decoder
from fledge.models.decoder import Decoder
from tests.tiny import tiny_decoder

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "eos_token_ids": (1,),
    "bos_token_id": 0,
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}assistant"


def tiny_target(seed: int = 0, **overrides) -> Decoder:
    return tiny_decoder(seed, **SIZES | overrides)


def save_target(decoder: Decoder, folder: Path, chat_template: str | None = None) -> Path:
    save_decoder(decoder, folder)
    save_tokenizer(folder, decoder.config.vocab_size, chat_template)
    return folder


def save_tokenizer(folder: Path, vocab_size: int, chat_template: str | None = None) -> None:
    """Saves a tokenizer whose words w5, w6, … and chat roles are one token each."""
    words = ["<s>", "</s>", "<unk>", "user", "assistant", *(f"w{i}" for i in range(5, vocab_size))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )
    fast.save_pretrained(folder)
