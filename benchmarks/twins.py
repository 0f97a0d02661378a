"""Trains an EAGLE 3.1 drafter and its EAGLE 3 twin side by side: same batches, same steps, same seed, one target pass for both.

    python benchmarks/twins.py --samples samples.npz --seconds 540 --out runs/twins

The target's states and the batches are shared, so that a comparison costs a quarter less than two runs of `fledge train`. The
learning rate follows the clock: the cosine ends when the time is up. `samples.npz` is a saved `SampleSet`.
`--warm` only compiles: run it beside other work to fill the compiler's cache.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fledge import sources
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.config import DrafterConfig, default_aux_layers
from fledge.models.drafter import EagleDrafter
from fledge.training.losses import LossSettings
from fledge.training.objective import Objective, ObjectiveSettings
from fledge.training.optimizers import build_optimizers, clip_gradients
from fledge.training.packing import PackedLoader
from fledge.training.prefetch import Prefetcher
from fledge.training.samples import Sample, SampleSet
from fledge.training.schedule import learning_rate_factor
from fledge.training.target import DecoderTarget
from fledge.training.vocabulary import DraftVocabulary
from fledge.training.warm_start import last_layer, start_from_target

LEARNING_RATES = {"3.1": 1e-3, "3": 2e-3}  # from a prototype's short sweeps
CLIP, WARMUP, LOG_EVERY = 0.5, 0.02, 100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/twins"))
    parser.add_argument("--seconds", type=float, default=540.0, help="of training, compiling not counted")
    parser.add_argument("--until", type=float, help="instead of --seconds: when to end (Unix time)")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--ttt", type=int, default=5)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--loss", default="mix")
    parser.add_argument("--serve-window", type=int, default=512, help="attention window written into the drafters; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", action="store_true")
    return parser.parse_args()


def random_samples(vocab_size: int, sequence: int) -> SampleSet:
    """For --warm: what is compiled depends on shapes alone."""
    rng = np.random.default_rng(0)
    return SampleSet.from_samples(
        Sample(rng.integers(0, vocab_size, 400, dtype=np.int32), np.arange(400) > 100) for _ in range(sequence // 4)
    )


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    decoder = load_decoder(sources.resolve(args.model), dtype, device)
    model = decoder.config
    if args.warm:
        samples = random_samples(model.vocab_size, args.sequence)
    else:
        samples, note = SampleSet.load(args.samples)
        print(
            f"{len(samples):,} samples, {len(samples.tokens):,} tokens, {int(samples.loss_mask.sum()):,} of answers", flush=True
        )
    vocabulary = DraftVocabulary.count(
        samples, args.draft_vocab, model.vocab_size, always=model.eos_token_ids, data_hash="", tokenizer_hash=""
    )
    print(f"draft vocabulary: {vocabulary}", flush=True)
    target = DecoderTarget(decoder, default_aux_layers(model.num_layers), compile=on_gpu)
    arms = {version: Arm(version, args, target, model, vocabulary, on_gpu, dtype, device) for version in LEARNING_RATES}
    loader = PackedLoader(samples, args.sequence, args.rows, args.seed)
    print(loader, flush=True)
    first = next(iter(arms.values()))
    prefetch = Prefetcher(loader, first.objective, device, 1)

    step, began, logged, log = 0, None, time.time(), []
    while True:
        batch = next(prefetch)
        if step == 3:  # compiled by now
            if on_gpu:
                torch.cuda.synchronize()
            began = time.time()
            end = args.until or began + args.seconds
            print(f"training for {end - began:.0f} s", flush=True)
            if args.warm:
                break
        progress = 0.0 if began is None else (time.time() - began) / (end - began)
        if progress >= 1:
            break
        planned, measure = batch.batches[0], (step + 1) % LOG_EVERY == 0
        with torch.no_grad():
            states = target.states(planned)
        factor = learning_rate_factor(progress, "cosine", WARMUP)
        results = {version: arm.step(planned, batch.num_valid_K, states, factor, measure) for version, arm in arms.items()}
        step += 1
        if measure:
            rate = LOG_EVERY * args.sequence * args.rows / (time.time() - logged)
            logged = time.time()
            entry = {"step": step, "epoch": batch.epoch, "tokens_per_second": rate, "progress": progress}
            for version, (loss, metrics) in results.items():
                hits = (metrics.hits_K.cpu() / batch.num_valid_K).tolist()
                acceptance = (metrics.acceptance_K.cpu() / batch.num_valid_K).tolist()
                entry[version] = {"loss": float(loss), "accuracy": hits, "acceptance": acceptance}
                if not np.isfinite(float(loss)):
                    raise SystemExit(f"the loss of EAGLE {version} is {float(loss)} at step {step}")
            log.append(entry)
            shown = "  ".join(
                f"{v}: loss {entry[v]['loss']:.3f} acc {' '.join(f'{a:.3f}' for a in entry[v]['accuracy'])}" for v in arms
            )
            print(f"step {step} epoch {batch.epoch:.2f} {rate / 1e3:.0f}k tok/s  {shown}", flush=True)
    prefetch.close()
    if args.warm:
        return
    facts = {
        "steps": step,
        "tokens_seen": step * args.sequence * args.rows,
        "epochs": batch.epoch,
        "training_seconds": time.time() - began,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "settings": {k: str(v) for k, v in vars(args).items()},
        "learning_rates": LEARNING_RATES,
        "samples": note,
        "draft_vocabulary": str(vocabulary),
        "provenance": provenance(),
    }
    for version, arm in arms.items():
        arm.save(args.out / f"eagle{version}", args.serve_window)
    write_json(args.out / "twins.json", facts | {"log": log})
    print(json.dumps({k: facts[k] for k in ("steps", "tokens_seen", "epochs", "training_seconds", "peak_memory_gib")}))


class Arm:
    """One of the drafters in training."""

    def __init__(self, version, args, target, model, vocabulary, on_gpu, dtype, device) -> None:
        flags = version == "3.1"
        config = DrafterConfig(
            vocab_size=model.vocab_size,
            draft_vocab_size=len(vocabulary.token_ids),
            hidden_size=model.hidden_size,
            target_hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            max_positions=model.max_positions,
            aux_layer_ids=target.taps,
            rms_norm_eps=model.rms_norm_eps,
            rope=model.rope,
            fc_norm=flags,
            norm_output=flags,
        )
        self.drafter = EagleDrafter(config)
        self.drafter.d2t.copy_(vocabulary.d2t())
        start_from_target(self.drafter, last_layer(target.decoder), target.head, target.embedding, args.seed)
        self.drafter.to(device)
        settings = ObjectiveSettings(
            steps=args.ttt, loss=LossSettings(args.loss), compute_dtype=dtype if on_gpu else None, compile=on_gpu
        )
        self.objective = Objective(self.drafter, target, settings, args.sequence, args.sequence * args.rows)
        self.optimizer = build_optimizers(self.drafter, "adamw", LEARNING_RATES[version])
        self.parameters = [p for p in self.drafter.parameters() if p.requires_grad]

    def step(self, planned, num_valid_K, states, factor, measure):
        weights = self.objective.step_weights(num_valid_K.to(planned.tokens_BT.device, non_blocking=True))
        loss, metrics = self.objective(planned, weights, measure=measure, states=states)
        loss.backward()
        clip_gradients(self.parameters, CLIP)
        self.optimizer.set_factor(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), metrics

    def save(self, folder: Path, window: int) -> None:
        # Trained without a window: serving with one is a restriction that only texts longer than it feel.
        self.drafter.config = replace(self.drafter.config, window=window or None)
        save_drafter(self.drafter, folder, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
