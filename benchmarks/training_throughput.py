"""Measures training throughput: tokens/s, peak memory and the target's share of the time.

    python benchmarks/training_throughput.py --model smollm2-135m --sequence 2048 --rows 16
    python benchmarks/training_throughput.py --random-target --sequence 128 --rows 2 --steps 2     # CPU smoke run

Tokens are random unless --data names answers. Random tokens cost as much as real ones if the same fraction has a loss.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fledge import sources
from fledge.checkpoints.hf import load_decoder
from fledge.config import DrafterConfig, ModelConfig, default_aux_layers
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.training.arm import build_optimizers
from fledge.training.data.packing import PackedLoader
from fledge.training.data.samples import Sample, SampleSet
from fledge.training.drafter import last_layer, start_from_target
from fledge.training.objective import Objective
from fledge.training.recipe import ObjectiveRecipe, OptimizerRecipe
from fledge.training.targets.target import DecoderTarget

# SmolLM2-135M's shape: the figures do not depend on the values of the weights.
SMOLLM2 = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_embeddings=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or built-in name of the target")
    parser.add_argument("--random-target", action="store_true", help="random weights of SmolLM2-135M's shape")
    parser.add_argument("--layers", type=int, help="fewer target layers (random target only)")
    parser.add_argument("--data", help="answers (JSONL); default: random tokens")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--ttt", type=int, default=5)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--window", type=int)
    parser.add_argument("--loss", default="kl")
    parser.add_argument("--chunk-rows", type=int)
    parser.add_argument("--document", type=int, default=700, help="mean length of a random document")
    parser.add_argument("--loss-share", type=float, default=0.75, help="fraction of a random document that has a loss")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--compile-parts", default="target,unroll,loss", help="which parts to compile")
    parser.add_argument("--profile", help="write a Chrome trace of two steps to this file")
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


def random_samples(args: argparse.Namespace, vocab_size: int) -> SampleSet:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(max(64, 3 * args.rows * args.sequence // args.document * 4)):
        length = int(np.clip(rng.gamma(2.0, args.document / 2), 16, args.sequence))
        mask = np.arange(length) >= length * (1 - args.loss_share)
        samples.append(Sample(rng.integers(0, vocab_size, length, dtype=np.int32), mask))
    return SampleSet.from_samples(samples)


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    parts = set() if args.no_compile or not on_gpu else set(args.compile_parts.split(","))
    if args.random_target:
        config = SMOLLM2
        if args.layers:
            config = ModelConfig(**{**vars(SMOLLM2), "num_layers": args.layers})
        decoder = Decoder(config).to(device, dtype)
        torch.nn.init.normal_(decoder.embed_tokens.weight, std=0.1)
    else:
        folder = sources.resolve(args.model)
        decoder = load_decoder(folder, dtype, device)
    config = decoder.config
    drafter_config = DrafterConfig(
        vocab_size=config.vocab_size,
        draft_vocab_size=args.draft_vocab,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_positions=config.max_positions,
        aux_layer_ids=default_aux_layers(config.num_layers),
        rope=config.rope,
        fc_norm=True,
        norm_output=True,
        window=args.window,
    )
    drafter = EagleDrafter(drafter_config)
    target = DecoderTarget(decoder, drafter_config.aux_layer_ids, compile="target" in parts)
    taps = [torch.randn(64, decoder.config.hidden_size) for _ in drafter.config.aux_layer_ids]
    start_from_target(drafter, last_layer(decoder), target.head, target.embedding, taps)
    drafter.to(device)
    settings = ObjectiveRecipe(ttt_steps=args.ttt, loss=args.loss, chunk_rows=args.chunk_rows)
    compute_dtype = dtype if on_gpu else None
    objective = Objective(drafter, target, settings, args.sequence, args.sequence * args.rows, compute_dtype=compute_dtype)
    if "unroll" in parts:
        objective.unroll = torch.compile(objective.unroll, dynamic=False)
    if "loss" in parts:
        objective.loss.compile()
    optimizer = build_optimizers(drafter, OptimizerRecipe(learning_rate=1e-3))
    if args.data:
        from fledge.tokenizer import Tokenizer
        from fledge.training.data.loading import load_samples

        samples, _ = load_samples(args.data, Tokenizer(folder), max_length=args.sequence)
    else:
        samples = random_samples(args, config.vocab_size)
    loader = PackedLoader(samples, args.sequence, args.rows, seed=0)
    planned = [objective.plan(next(loader)) for _ in range(min(8, args.steps))]
    scored = sum(float(b.num_valid_K[0]) for b in planned) / len(planned) / args.rows / args.sequence
    batches = [batch.to(device) for batch in planned]

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def step(index: int) -> torch.Tensor:
        batch = batches[index % len(batches)]
        loss, _ = objective(batch, objective.step_weights(batch.num_valid_K), measure=index % 10 == 0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    started = time.perf_counter()
    for index in range(args.warmup):
        loss = step(index)
        synchronize()
        print(f"warm-up step {index}: loss {float(loss):.3f}, {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if args.profile:
        with torch.profiler.profile() as profile:
            for index in range(2):
                step(1 + index)
            synchronize()
        profile.export_chrome_trace(args.profile)
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=order, row_limit=25), file=sys.stderr)

    def timed(run) -> float:
        synchronize()
        begin = time.perf_counter()
        for index in range(args.steps):
            run(index)
        synchronize()
        return (time.perf_counter() - begin) / args.steps

    whole = timed(step)
    target_only = timed(lambda index: target.states(batches[index % len(batches)]))
    tokens = args.rows * args.sequence
    figures = {
        "tokens_per_second": round(tokens / whole),
        "seconds_per_step": round(whole, 5),
        "target_share": round(target_only / whole, 3),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "tokens_per_step": tokens,
        "scored_share": round(scored, 3),
        "ttt_steps": args.ttt,
        "sequence": args.sequence,
        "rows": args.rows,
        "draft_vocabulary": args.draft_vocab,
        "window": args.window,
        "loss": args.loss,
        "chunk_rows": objective.chunk_rows,
        "compiled": sorted(parts),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "command": " ".join(sys.argv),
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
