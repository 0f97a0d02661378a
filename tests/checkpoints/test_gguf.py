"""GGUF files: architectures, quantisations, rope, tokenizers, and refused files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from fledge import sources
from fledge.checkpoints.gguf import convert
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.hf import load_config, load_decoder
from fledge.config import MoEConfig, RopeConfig
from fledge.errors import ModelError
from fledge.models.decoder import causal_attend
from fledge.models.layers import Rotary
from fledge.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import FAMILIES, write_gguf
from tests.tiny import tiny_decoder

VOCAB = 288


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture(arch: str, tied: bool, tmp_path: Path) -> None:
    family, settings = FAMILIES[arch]
    decoder = tiny_decoder(architecture=family, vocab_size=VOCAB, tie_embeddings=tied, rms_norm_eps=1e-6, **settings)
    folder = convert(write_gguf(tmp_path / "tiny.gguf", decoder, arch.partition("-")[0]), tmp_path / "folder")
    loaded = load_decoder(folder)
    for (name, mine), (_, theirs) in zip(loaded.named_parameters(), decoder.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name, rtol=0, atol=1e-6 if "norm" in name else 0)
    config = loaded.config
    assert (config.architecture, config.tie_embeddings, config.rms_norm_eps) == (family, tied, 1e-6)
    for key, value in settings.items():
        assert getattr(config, key) == value
    assert (config.eos_token_ids, config.bos_token_id, config.max_positions) == ((2,), 1, 512)


# Settings that transformers does not read from these files, at its defaults.
WIDE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256, "rope": RopeConfig(1e6, original_max_positions=512)}
AS_TRANSFORMERS = {
    "gemma3": FAMILIES["gemma3"][1] | WIDE,
    "phi3": {"rotated": None},
    "qwen3moe": {"moe": MoEConfig(8, 3, 768, layers=(0, 1, 2, 3))},
}


@pytest.mark.parametrize("arch", AS_TRANSFORMERS)
@torch.no_grad()
def test_transformers_reads_the_same(arch: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(1, FAMILIES[arch][0], vocab_size=VOCAB, tie_embeddings=True, **AS_TRANSFORMERS[arch])
    file = write_gguf(
        tmp_path / "tiny.gguf", decoder, arch, metadata={f"{arch}.vocab_size": VOCAB, "tokenizer.ggml.padding_token_id": 0}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    loaded, tokens = load_decoder(convert(file, tmp_path / "folder")), torch.arange(40)
    found = loaded.logits(loaded(tokens, tokens, causal_attend()).hidden_ND)
    wanted = model(tokens[None]).logits[0]
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_scores_of_gemma_27b_are_scaled_by_its_hidden_size(tmp_path: Path) -> None:
    sizes = {"num_layers": 62, "windows": tuple(None if layer % 6 == 5 else 8 for layer in range(62))}
    decoder = tiny_decoder(1, "Gemma3ForCausalLM", vocab_size=VOCAB, **sizes, num_heads=2, num_kv_heads=1, query_scale=1.0)
    config = load_config(convert(write_gguf(tmp_path / "tiny.gguf", decoder, "gemma3"), tmp_path / "folder"))
    assert config.windows == decoder.config.windows
    assert config.query_scale == (8 / 16) ** 0.5


def test_one_expert_too_many_or_too_few(tmp_path: Path) -> None:
    family, settings = FAMILIES["qwen3moe"]
    decoder = tiny_decoder(1, family, vocab_size=VOCAB, **settings)
    for count, named in ((7, r"not expected: .*experts\.7\."), (9, r"missing: .*experts\.8\.")):
        file = write_gguf(tmp_path / "tiny.gguf", decoder, "qwen3moe", metadata={"qwen3moe.expert_count": count})
        with pytest.raises(ModelError, match=named):
            convert(file, tmp_path / "folder")


def test_sliding_window_makes_the_family_mistral(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", metadata={"llama.attention.sliding_window": 16}
    )
    config = load_config(convert(file, tmp_path / "folder"))
    assert config.architecture == "MistralForCausalLM"
    assert config.windows == (16,) * 4


def test_all_end_tokens_are_used(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", metadata={"tokenizer.ggml.eot_token_id": 0}
    )
    assert load_config(convert(file, tmp_path / "folder")).eos_token_ids == (2, 0)


# Largest error of a quantisation, relative to the largest weight: half a step, plus rounding of the scale.
LARGEST_ERROR = {
    "F32": 0, "F16": 2**-11, "BF16": 2**-8,
    "Q8_0": 1 / 220, "Q5_0": 1 / 15, "Q5_1": 1 / 30, "Q4_0": 1 / 7, "Q4_1": 1 / 14,
}  # fmt: skip


@pytest.mark.parametrize("quantisation", LARGEST_ERROR)
def test_quantisations_the_package_can_write(quantisation: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(vocab_size=VOCAB)
    file = write_gguf(tmp_path / "tiny.gguf", decoder, "llama", quantisation)
    loaded = dict(load_decoder(convert(file, tmp_path / "folder")).named_parameters())
    for name, value in decoder.named_parameters():
        error = (loaded[name] - value).abs().max()
        assert error <= LARGEST_ERROR[quantisation] * value.abs().max(), name
        assert (error > 0) == (quantisation != "F32" and value.ndim == 2)  # matrices were quantised


def scales_and_minima(packed: np.ndarray) -> list[tuple[int, int]]:
    """Unpacks eight pairs of 6-bit numbers from 12 bytes, as the K formats store them."""
    q = [int(byte) for byte in packed]
    pairs = [(q[j] & 63, q[j + 4] & 63) for j in range(4)]
    pairs += [((q[j + 4] & 15) | (q[j - 4] >> 6 << 4), (q[j + 4] >> 4) | (q[j] >> 6 << 4)) for j in range(4, 8)]
    return pairs


def reference_block(kind: str, block: np.ndarray) -> list[float]:
    """Dequantises one block of 256 weights, one by one, following the format's definition."""

    def half(at: int) -> float:
        return float(block[at : at + 2].view(np.float16)[0])

    values = [0.0] * 256
    if kind == "Q6_K":
        low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), half(208)
        for at in range(256):
            part, quarter, lane = at // 128, at % 128 // 32, at % 32
            nibble = int(low[part * 64 + quarter % 2 * 32 + lane]) >> (4 * (quarter // 2)) & 15
            bits = int(high[part * 32 + lane]) >> (2 * quarter) & 3
            values[at] = d * int(scales[part * 8 + quarter * 2 + lane // 16]) * ((nibble | bits << 4) - 32)
        return values
    d, smallest, pairs = half(0), half(2), scales_and_minima(block[4:16])
    quants = block[16:] if kind == "Q4_K" else block[48:]
    for at in range(256):
        group, lane = at // 32, at % 32
        quant = int(quants[group // 2 * 32 + lane]) >> (4 * (group % 2)) & 15
        if kind == "Q5_K":
            quant |= (int(block[16 + lane]) >> group & 1) << 4
        scale, minimum = pairs[group]
        values[at] = d * scale * quant - smallest * minimum
    return values


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)])
def test_k_quantisations(kind: str, size: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (6, size), dtype=np.uint8)
    scales = random.uniform(0.01, 0.1, (6, 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[:, 208:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("blocks", blocks.reshape(3, 2 * size), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = GgufFile(tmp_path / "blocks.gguf").tensors.values()
    expected = torch.tensor([reference_block(kind, block) for block in blocks]).reshape(3, 512)
    assert tensor.shape == (3, 512)
    torch.testing.assert_close(tensor.blocks.dequantised(), expected, rtol=1e-5, atol=1e-6)


def test_another_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB, hidden_size=256), "llama")
    raw = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8  # after the name: number of dimensions, two sizes, then the type
    for number, said in ((int(gguf.GGMLQuantizationType.IQ2_XS), "IQ2_XS"), (4711, "number 4711")):
        path.write_bytes(raw[:at] + number.to_bytes(4, "little") + raw[at + 4 :])
        expected = rf"quantisation {said} \(of blk\.0\.ffn_up\.weight\) is not supported; supported: F32, F16"
        with pytest.raises(ModelError, match=expected):
            convert(path, tmp_path / "folder")


def converted_rope(tmp_path: Path, metadata: dict | None = None, **more: object) -> RopeConfig:
    decoder = tiny_decoder(vocab_size=VOCAB, rope=RopeConfig(5e5), head_dim=64)
    file = write_gguf(tmp_path / "tiny.gguf", decoder, "llama", metadata=metadata, **more)
    return load_config(convert(file, tmp_path / "folder")).rope


def test_rope_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert converted_rope(tmp_path, linear) == RopeConfig(5e5, "linear", 4.0, 512)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    assert converted_rope(tmp_path, yarn) == RopeConfig(5e5, "yarn", 4.0, 128)
    assert converted_rope(tmp_path) == RopeConfig(5e5, original_max_positions=512)
    with pytest.raises(ModelError, match="rope scaling 'longrope' is not supported"):
        converted_rope(tmp_path, {"llama.rope.scaling.type": "longrope"})


def test_llama3_rope_is_recognised_by_its_factors(tmp_path: Path) -> None:
    rope = RopeConfig(5e5, "llama3", 32.0, 8192)
    plain = Rotary(64, 512, RopeConfig(5e5)).inverse_frequencies
    factors = (plain / Rotary(64, 512, rope).inverse_frequencies).numpy()
    assert converted_rope(tmp_path, tensors={"rope_freqs.weight": factors}) == rope
    assert converted_rope(tmp_path, tensors={"rope_freqs.weight": np.ones(32, np.float32)}).kind == "default"
    with pytest.raises(ModelError, match=r"rope_freqs\.weight do not match Llama 3"):
        converted_rope(tmp_path, tensors={"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)})


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "12 1", ["1", "2", "Ġ", "1"]),  # each digit is a token, and so is the space
        ("qwen2", "12 1", ["1", "2", "Ġ", "1"]),
        ("llama-bpe", "12 1", ["12", "Ġ", "1"]),  # up to three digits, without the space
        ("dbrx", "12 1", ["12", "Ġ", "1"]),
        ("gpt-4o", "hell/\n1", ["hell", "/", "Ċ", "1"]),  # punctuation is joined with line breaks and slashes
        ("gpt-4o", "he'll12 1", ["he", "'", "ll", "12", "Ġ", "1"]),
        ("gpt-2", "12 1", ["12", "Ġ1"]),  # a space belongs to the next word
        ("qwen2", "hell\nhe", ["hell", "Ċ", "he"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, tokens: list[str], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", pre=pre)
    tokenizer = Tokenizer(convert(file, tmp_path / "folder"))
    assert [tokenizer.token(token_id) for token_id in tokenizer.encode(text)] == tokens


def test_no_warning_about_a_correct_pattern(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns about large tokenizers without a version in their config, because some of Mistral's were wrong."""
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", pre="qwen2")
    folder = convert(file, tmp_path / "folder")
    large = json.loads((folder / "tokenizer.json").read_text())
    large["model"]["vocab"] |= {f"more {number}": number for number in range(VOCAB, 100_002)}
    (folder / "tokenizer.json").write_text(json.dumps(large))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        Tokenizer(folder)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_tokenizer_marks_and_chat_template(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama")
    tokenizer = Tokenizer(convert(file, tmp_path / "folder"))
    assert tokenizer.encode("<|im_start|>he<|im_end|>") == [1, tokenizer.encode("he")[0], 2]
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([1, 3, 2]) == "<think>"  # user-defined tokens are text, special tokens are not
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=False) == "<|im_start|><think><|im_end|>"
    assert tokenizer.render_chat([{"role": "user", "content": "he"}]) == (
        "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant"
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}])[0] == 1


def test_bos_token(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", metadata={"tokenizer.ggml.add_bos_token": True}
    )
    tokenizer = Tokenizer(convert(file, tmp_path / "folder"))
    assert tokenizer.encode("he")[0] == 1
    assert tokenizer.encode("he", add_special_tokens=False)[0] != 1


def sentencepiece_metadata() -> dict:
    """Metadata whose scores rank the merges. 'ld' is no piece, so 'world' stays split; 'é' exists only as bytes."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(pieces)
    for rank, piece in enumerate(["he", "▁w", "ll", "hell", "hello", "▁hello", "or", "▁wor"]):
        pieces.append(piece)
        scores.append(-float(rank))
    for letter in "▁helowrd":
        pieces.append(letter)
        scores.append(-100.0)
    types += [1] * (len(pieces) - len(types))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": None,
    }


def test_sentencepiece(tmp_path: Path) -> None:
    decoder, metadata = tiny_decoder(vocab_size=VOCAB), sentencepiece_metadata()
    file = write_gguf(tmp_path / "tiny.gguf", decoder, "llama", metadata=metadata)
    tokenizer = Tokenizer(convert(file, tmp_path / "folder"))
    ids = tokenizer.encode("hello world é")
    names = [tokenizer.token(token_id) for token_id in ids]
    assert names == ["<s>", "▁hello", "▁wor", "l", "d", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello world é"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "GGUF architecture 'gpt2' is not supported; supported: llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": 5}, r"missing: model\.layers\.4\.input_layernorm"),
        ({"llama.rope.dimension_count": 4}, "partially rotated heads"),
        ({"split.count": 2}, "split GGUF; join the parts"),
        ({"tokenizer.ggml.pre": "exotic"}, "pre-tokenizer 'exotic'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer type 't5' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer in the file"),
        ({"tokenizer.ggml.merges": ["no such"]}, "tokenizer is inconsistent"),
    ],
)
def test_refused(metadata: dict, message: str, tmp_path: Path) -> None:
    arch = metadata.pop("general.architecture", "llama")
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), arch, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        convert(file, tmp_path / "folder")


def test_unknown_tensors_are_listed(tmp_path: Path) -> None:
    more = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 32), np.float32)}
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", tensors=more)
    with pytest.raises(ModelError, match=r"not expected: blk\.0\.ffn_gate_inp\.weight"):
        convert(file, tmp_path / "folder")


@pytest.mark.parametrize("share", [0.0001, 0.005, 0.02, 0.1, 0.5, 0.999])
def test_truncated(share: float, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama")
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ModelError, match="damaged or truncated GGUF") as error:
        convert(file, tmp_path / "folder")
    assert "\n" not in str(error.value)


def test_not_gguf_at_all(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_bytes(b"<html>sign in</html>")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(tmp_path / "page.gguf", tmp_path / "folder")


@pytest.mark.real
def test_smollm2_tokenizer_equals_transformers(smollm2_folder: Path) -> None:
    file = sources.download(sources.BUILT_INS["smollm2-135m"])
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = Tokenizer(smollm2_folder)
    texts = ["Hello world", "it's   a\n\n test\t!", "héllo 世界 🎉", "def f(x):\n    return 1", "<|im_start|>user"]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text
    digits = [ours.token(token_id) for token_id in ours.encode("In 2024")]
    assert digits == ["In", "Ġ", "2", "0", "2", "4"]
    assert ours.encode("<|im_start|><|im_end|>") == [1, 2]
    assert ours.vocab_size == 49152
    assert "named SmolLM" in ours.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.real
def test_smollm2_weights_equal_the_package_reading(smollm2_folder: Path) -> None:
    """Compares some tensors of each kind with the gguf package; q and k are in llama.cpp's row order."""
    file = sources.download(sources.BUILT_INS["smollm2-135m"])
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    decoder = load_decoder(smollm2_folder)

    def raw(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type).copy())

    layer = decoder.layers[7]
    assert torch.equal(decoder.embed_tokens.weight, raw("token_embd.weight"))
    assert torch.equal(layer.mlp.down_proj.weight, raw("blk.7.ffn_down.weight"))
    interleaved = [row // 2 + 32 * (row % 2) for row in range(64)]  # our row for each row of the file
    for at, name, num_heads in ((0, "attn_q", 9), (9, "attn_k", 3)):
        heads = layer.self_attn.qkv_proj.weight.unflatten(0, (-1, 64))[at : at + num_heads]
        assert torch.equal(heads[:, interleaved].flatten(0, 1), raw(f"blk.7.{name}.weight"))
