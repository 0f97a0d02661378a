"""Exports drafters for other servers and imports drafters of other trainers. Each is checked before it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge import __version__, sources
from fledge.checkpoints import drafter_layout, eagle3, int8_storage, origins
from fledge.checkpoints.drafter_config import LAYER_IDS, config_to_hf
from fledge.checkpoints.drafter_files import WEIGHTS, DrafterFiles, find_drafter, read_drafter_files, write_drafter_files
from fledge.checkpoints.provenance import FILE as PROVENANCE
from fledge.checkpoints.speculators import save_speculators
from fledge.checkpoints.tensors import read_json
from fledge.config import DrafterConfig, ModelConfig
from fledge.errors import ModelError
from fledge.files import hash_files
from fledge.models.drafter import EagleDrafter

DESTINATIONS = ("vllm", "sglang", "speculators", "fledge")
STORAGES = ("plain", "int8")
TESTED_VLLM = "0.32.0"
VLLM_LATENT_SIZES = (320, 512, 576)  # sizes that vLLM's latent attention has kernels for


def export_drafter(
    folder: str | Path,
    to: str,
    out: str | Path,
    target_name: str,
    *,
    target: ModelConfig | None = None,
    num_draft_tokens: int = 3,
    storage: str = "plain",
) -> Path:
    """Writes the drafter in `folder` for a server and returns the new folder.

    `target_name` goes into the launch command in the README; `target` is needed for a drafter that names no layer ids.
    `storage`: int8 has half the size, but only Fledge reads it; plain also converts 8-bit weights to plain ones.
    """
    if to not in DESTINATIONS:
        raise ModelError(f"cannot export to {to!r}; possible: {', '.join(DESTINATIONS)}")
    if storage not in STORAGES:
        raise ModelError(f"storage {storage!r} is not supported; possible: {', '.join(STORAGES)}")
    if storage == "int8" and to != "fledge":
        raise ModelError(f"{_TITLES[to]} does not read drafters stored in 8 bits; write it --to fledge")
    _not_onto_itself(folder, out)
    found = find_drafter(folder)
    files = origins.canonical(read_drafter_files(found))
    drafter = _checked(files, target, folder)
    texts = {"README.md": _readme(drafter.config, to, Path(out), target_name, num_draft_tokens)}
    if to == "fledge" and (card := found / "README.md").is_file():
        texts["README.md"] = card.read_text(encoding="utf-8")
    if (record := found / PROVENANCE).is_file():
        texts[PROVENANCE] = record.read_text(encoding="utf-8")
    if to == "speculators":
        architecture = target.architecture if target is not None else "LlamaForCausalLM"
        return save_speculators(
            drafter,
            out,
            target_name,
            verifier_architecture=architecture,
            speculative_tokens=num_draft_tokens,
            texts=texts,
        )
    if to == "sglang":
        dtype = drafter.fc.weight.dtype
        return write_drafter_files(out, _sglang_config(drafter), drafter_layout.to_file(drafter, dtype), texts)
    if to == "vllm":
        _refuse("vLLM", "use Fledge", _not_on_vllm(drafter.config))
    return eagle3.save_drafter(drafter, out, texts=texts, int8=storage == "int8")


def plain_folder(folder: Path) -> Path:
    """A folder of the drafter that other servers read: its own, or a plain copy in the cache if it has 8-bit weights."""
    config = folder / "config.json"
    if not config.is_file() or not int8_storage.is_stored(read_json(config)):
        return folder
    content = hash_files(folder / name for name in ("config.json", WEIGHTS))
    copy = sources.cache_folder() / "drafters" / f"{folder.name}-{content[:16]}"
    return copy if copy.is_dir() else export_drafter(folder, "fledge", copy, "TARGET")


def import_drafter(
    folder: str | Path,
    out: str | Path,
    *,
    target: ModelConfig | None = None,
    layer_ids: tuple[int, ...] | None = None,
) -> tuple[Path, list[str]]:
    """Writes any readable checkpoint in the raw layout; returns the folder and what was changed.

    `layer_ids`: overrides the checkpoint's (0 = embeddings, i = after i layers).
    """
    _not_onto_itself(folder, out)
    files = origins.canonical(read_drafter_files(find_drafter(folder)))
    if layer_ids is not None:
        ids = {LAYER_IDS: list(layer_ids), "num_aux_hidden_states": len(layer_ids)}
        settings = {**files.config, **ids, "eagle_config": {LAYER_IDS: list(layer_ids)}}
        files = replace(files, config=settings, notes=[*files.notes, f"layer ids set to {list(layer_ids)}"])
    files = with_d2t(files)
    drafter = _checked(files, target, folder)
    notes = files.notes or [f"{files.origin} layout, unchanged"]
    return eagle3.save_drafter(drafter, out), notes


def with_d2t(files: DrafterFiles) -> DrafterFiles:
    """Rebuilds a missing d2t from t2d, if t2d marks exactly draft_vocab_size tokens."""
    t2d, size = files.tensors.get("t2d"), files.config.get("draft_vocab_size")
    if "d2t" in files.tensors or t2d is None or int(t2d.to(torch.bool).sum()) != size:
        return files
    tensors = {**files.tensors, "d2t": origins.rebuilt_d2t(t2d)}
    return replace(files, tensors=tensors, notes=[*files.notes, "d2t was missing and is rebuilt from t2d"])


def _checked(files: DrafterFiles, target: ModelConfig | None, name: str | Path) -> EagleDrafter:
    config, problems = eagle3.check(files, target)
    if problems or config is None:
        raise ModelError(f"drafter {name}: " + "; ".join(problems))
    return eagle3.build_drafter(config, files, files.tensors["fc.weight"].dtype, "cpu")


def _not_onto_itself(folder: str | Path, out: str | Path) -> None:
    if Path(folder).expanduser().resolve() == Path(out).expanduser().resolve():
        raise ModelError(f"{out}: the drafter itself would be overwritten; choose another folder")


def _refuse(server: str, instead: str, unsupported: dict[str, bool]) -> None:
    if refused := [name for name, present in unsupported.items() if present]:
        raise ModelError(f"{server} does not serve drafters with {'; '.join(refused)}: {instead}")


def _not_on_vllm(config: DrafterConfig) -> dict[str, bool]:
    """Options of latent attention that vLLM silently ignores or fails to load, and whether the drafter has them."""
    if (mla := config.mla) is None:
        return {}
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    kernels = ", ".join(map(str, VLLM_LATENT_SIZES))
    return {
        "latent attention and norm_before_fc": config.norm_before_fc,
        "latent attention and a window": config.window is not None,
        "latent attention without q_lora_rank": not mla.q_lora_rank,
        f"kv_lora_rank + qk_rope_head_dim of {latent} (it has {kernels})": latent not in VLLM_LATENT_SIZES,
    }


def _sglang_config(drafter: EagleDrafter) -> dict[str, Any]:
    """config.json for SGLang: it reads layer ids from eagle_config, and takes a first id of 1 as counting outputs (our 2)."""
    config, mla = drafter.config, drafter.config.mla
    unsupported = {
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "attention or MLP biases": config.attention_bias or config.mlp_bias,
        "more than one draft layer": config.num_layers > 1,
        "a tap after the first layer (it reads a first id of 1 as 2)": config.aux_layer_ids[0] == 1,
        "norms on queries and keys": config.qk_norm,
        "latent attention without q_lora_rank": mla is not None and not mla.q_lora_rank,
        "latent attention and a window": mla is not None and config.window is not None,
    }
    _refuse("SGLang", "use vLLM", unsupported)
    ids = list(config.aux_layer_ids)
    # A first id of 1 is read correctly by every version; other first ids only by versions of mid-May 2026 and later.
    theirs = [i - 1 for i in ids] if ids[0] == 2 else ids
    settings = config_to_hf(config, drafter.fc.weight.dtype)
    del settings[LAYER_IDS]
    settings["eagle_config"] = {LAYER_IDS: theirs, "use_aux_hidden_state": True}
    if not config.own_head:
        settings["draft_vocab_size"] = None  # makes SGLang share the target's head
    return settings


def launch_commands(
    folder: str | Path, place: str | Path, target_name: str, num_draft_tokens: int = 3, elsewhere: str | Path | None = None
) -> dict[str, str]:
    """The commands that serve a drafter, by server. `place`: the path where the drafter of `folder` will be.

    `elsewhere`: the target's name for other servers, which do not know Fledge's built-in names. SGLang needs an export first,
    because it reads other keys.
    """
    config = eagle3.load_drafter(folder).config
    place, known = Path(place), str(elsewhere or target_name)
    settings = f'{{"model": "{place}", "method": "eagle3", "num_speculative_tokens": {num_draft_tokens}}}'
    commands = {"Fledge": f"fledge serve {target_name} --speculative-config '{settings}'"}
    if not any(_not_on_vllm(config).values()):
        commands["vLLM"] = "\n".join(_vllm_command(config, place, known, num_draft_tokens))
    other = place.with_name(place.name + "-sglang")
    export = f"fledge export {place} {other} --to sglang"
    commands["SGLang"] = "\n".join([export, *_sglang_command(config, other, known, num_draft_tokens)])
    return commands


def _readme(config: DrafterConfig, to: str, out: Path, target: str, num_draft_tokens: int) -> str:
    lines = [
        f"# {out.name}",
        "",
        f"EAGLE {config.version} drafter for `{target}`, written by Fledge for {_TITLES[to]}.",
        "",
        f"- taps the target after layers {', '.join(map(str, config.aux_layer_ids))} (0 = the embeddings)",
        f"- draft vocabulary {config.draft_vocab_size} of {config.vocab_size}; {config.num_layers} draft layer(s) of "
        f"{config.hidden_size}; positions up to {config.max_positions}",
        f"- {config.attention}",
        "",
        "## Serve",
        "",
        "```bash",
        *_COMMANDS[to](config, out, target, num_draft_tokens),
        "```",
        "",
        "## Versions",
        "",
        *_VERSIONS[to],
        *(_MLA_VERSIONS.get(to, ()) if config.mla is not None else ()),
    ]
    return "\n".join(lines) + "\n"


def _fledge_command(config: DrafterConfig, out: Path, target: str, num_draft_tokens: int) -> list[str]:
    return [f"fledge serve {target} --drafter {out} --depth {num_draft_tokens}"]


def _vllm_command(config: DrafterConfig, out: Path, target: str, num_draft_tokens: int) -> list[str]:
    settings = f'{{"model": "{out}", "method": "eagle3", "num_speculative_tokens": {num_draft_tokens}}}'
    return [f"vllm serve {target} --speculative-config '{settings}'"]


def _sglang_command(config: DrafterConfig, out: Path, target: str, num_draft_tokens: int) -> list[str]:
    window = [f"  --speculative-draft-window-size {config.window} \\"] if config.window else []
    return [
        f"python -m sglang.launch_server --model-path {target} \\",
        *window,
        f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {out} \\",
        f"  --speculative-num-steps {num_draft_tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {num_draft_tokens + 1}",
    ]


_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "vLLM, in the speculators layout", "fledge": "Fledge"}
_COMMANDS = {"vllm": _vllm_command, "sglang": _sglang_command, "speculators": _vllm_command, "fledge": _fledge_command}
_VERSIONS = {
    "fledge": [f"Written by Fledge {__version__}. `fledge export` writes it for other servers."],
    "vllm": [
        f"vLLM 0.25 or later; tested with {TESTED_VLLM}. The same greedy tokens and the same drafts as in Fledge.",
    ],
    "speculators": [
        f"vLLM 0.25 or later; tested with {TESTED_VLLM}. Earlier versions silently drop `fc_norm` and `norm_output` from",
        "this layout and draft badly. `vllm serve` also accepts this folder as the model: it then takes the target from",
        "config.json.",
    ],
    "sglang": [
        "If the drafter is not plain EAGLE 3: a version that supports `fc_norm` and `norm_output` (mid-2026 or later).",
        "SGLang always uses the target's embedding for a drafter of the same hidden size. `fledge doctor` on this folder and",
        "the server's own acceptance length should agree: compare them once.",
    ],
}
# vLLM's first releases with latent attention draft badly without an error.
_MLA_VERSIONS = {
    "vllm": [
        "",
        "Do not use 0.22.0 or 0.22.1 for this drafter: with latent attention (MLA) they load `fc_norm` but do not apply it, so",
        "the server looks healthy but accepts almost no drafts.",
    ],
    "sglang": ["", "Drafters with latent attention (MLA) need a version that has the model `Eagle3DeepseekV2ForCausalLM`."],
}
