"""Reports a drafter's configuration and all problems in its files, without building the network."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge.checkpoints import eagle3, origins
from fledge.checkpoints.drafter_config import FLAGS, LAYER_IDS, QK_NORM_ARCHITECTURE, named_layers
from fledge.checkpoints.drafter_files import DrafterFiles, find_drafter, read_drafter_files
from fledge.config import DrafterConfig, ModelConfig
from fledge.errors import ModelError

# The default in trainers' templates. A drafter that still has it does not draft past this position, even if its target goes on.
TEMPLATE_MAX_POSITIONS = 2048


@dataclass(frozen=True)
class DrafterReport:
    """The result of `inspect_drafter`. `config` is None if config.json cannot be read; `problems` then says why."""

    folder: str
    origin: str
    config: DrafterConfig | None
    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]
    problems: tuple[str, ...]  # reasons why it does not load
    warnings: tuple[str, ...]  # it loads, but these are probably mistakes
    notes: tuple[str, ...] = field(default=())  # how its trainer's layout was translated
    storage: str = ""  # how the file stores the weights; empty: as plain numbers

    @property
    def version(self) -> str | None:
        return None if self.config is None else self.config.version

    def as_dict(self) -> dict[str, Any]:
        facts = {key: value for key, value in asdict(self).items() if key != "config"}
        config = self.config
        if config is None:
            return {"version": None, **facts}
        return {
            "version": config.version,
            "flags": {flag: getattr(config, flag) for flag in FLAGS},
            "vocabulary_share": config.draft_vocab_size / config.vocab_size,
            **facts,
            "config": asdict(config),
        }


def inspect_drafter(folder_or_name: str | Path, target: ModelConfig | None = None) -> DrafterReport:
    folder = find_drafter(folder_or_name)
    files = read_drafter_files(folder)
    read_as_written = files.config
    try:
        files = origins.canonical(files)
        config, problems = eagle3.check(files, target)
    except ModelError as error:
        config, problems = None, [str(error)]
    weights = {name: tensor for name, tensor in files.tensors.items() if name not in ("d2t", "t2d")}
    return DrafterReport(
        folder=str(folder),
        origin=files.origin,
        config=config,
        num_parameters=sum(tensor.numel() for tensor in weights.values()),
        num_bytes=files.num_bytes,
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})),
        problems=tuple(problems),
        warnings=tuple(_warnings(files, read_as_written, config, target)) if config else (),
        notes=tuple(files.notes),
        storage=files.storage,
    )


def _warnings(files: DrafterFiles, as_written: dict[str, Any], config: DrafterConfig, target: ModelConfig | None) -> list[str]:
    warnings = []
    if config.max_positions == TEMPLATE_MAX_POSITIONS:
        warnings.append(
            f"max_position_embeddings is {TEMPLATE_MAX_POSITIONS}, the default of training templates: drafts past that "
            "position are poor or refused by servers; set it to the length it was trained for"
        )
    elif target is not None and config.max_positions < target.max_positions:
        warnings.append(f"max_position_embeddings {config.max_positions} is below the target's {target.max_positions}")
    if target is not None and config.rope.theta != target.rope.theta:
        warnings.append(f"rope theta {config.rope.theta:g} differs from the target's {target.rope.theta:g}")
    if not any(named_layers(files.config)):
        warnings.append(f"{LAYER_IDS} is not named; the default {list(config.aux_layer_ids)} is assumed")
    nested = as_written.get("eagle_config") or {}
    hidden = [flag for flag in ("fc_norm", "norm_output") if nested.get(flag) and as_written.get(flag) is None]
    if hidden:
        warnings.append(f"{' and '.join(hidden)} only inside eagle_config, which vLLM does not read: `fledge import` it")
    if QK_NORM_ARCHITECTURE in (as_written.get("architectures") or ()) and not config.qk_norm:
        warnings.append(
            f"architecture {QK_NORM_ARCHITECTURE} without norms on queries and keys: read as a Llama drafter here, but vLLM "
            "0.32 norms them anyway: `fledge import` it"
        )
    if config.mla is not None and as_written.get("model_type") == "deepseek_v3":
        warnings.append(
            "model_type deepseek_v3: vLLM 0.32 mistakes such a drafter for DeepSeek's own MTP layers and does not load it: "
            "`fledge import` it"
        )
    d2t = files.tensors.get("d2t")
    if config.draft_vocab_size < config.vocab_size and d2t is not None and not d2t.any():
        warnings.append(
            f"d2t is all zero: the draft vocabulary is the target's first {config.draft_vocab_size} tokens, "
            "which is rarely intended; probably the map was never filled"
        )
    return warnings
