"""Writes a tiny random model with a tokenizer and a chat template, which a server process loads in a second."""

from __future__ import annotations

from pathlib import Path

import torch

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat with a hat",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "What is the weather like in Paris today? Tell me about the weather, please.",
    "def add(a, b):\n    return a + b\n",
]
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(folder: Path) -> int:
    """Writes the tokenizer and returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def make_model(folder: Path, seed: int = 0, max_positions: int = 512) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights far larger than a trained model's make a wide gap between the two best tokens. Little attention makes
            # each token depend mostly on the last one, so that greedy text soon repeats and drafts are accepted.
            scale = 1.0 if "embed" in name else 0.1 if "norm" in name else 0.05 if "o_proj" in name else 0.4
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder
