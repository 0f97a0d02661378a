"""Maps a drafter's tensors between the file (raw EAGLE 3 layout) and the network, and checks names and shapes.

Files store q, k, v (in latent attention: the projections of the input) and gate, up separately, and call the first draft layer
`midlayer`; the network fuses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fledge.checkpoints.tensors import ShapesOnly, listed
from fledge.config import DrafterConfig
from fledge.models.drafter import EagleDrafter

VOCABULARY_MAPS = ("d2t", "t2d")
# Prefix of weights -> the flag that must be set exactly if these weights exist.
_FLAG_OF_TENSOR = {"fc_norm.": "fc_norm", "input_norm.": "norm_before_fc"}


def file_parts(network_name: str, config: DrafterConfig) -> list[tuple[str, int | None]]:
    """The file's tensors whose rows, stacked, are one tensor of the network: [(name, rows)]; rows None: all rows."""
    name = network_name.replace("layers.0.", "midlayer.", 1) if network_name.startswith("layers.0.") else network_name
    if ".qkv_proj." in name:
        rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        return [(name.replace("qkv_proj", f"{part}_proj"), n * config.head_dim) for part, n in rows.items()]
    if ".qkv_a_proj." in name:
        mla = config.mla
        assert mla is not None, "no other attention has such weights"
        queries = ("q_a_proj", mla.q_lora_rank) if mla.q_lora_rank else ("q_proj", config.num_heads * mla.qk_head_dim)
        latents = ("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim)
        return [(name.replace("qkv_a_proj", part), rows) for part, rows in (queries, latents)]
    if ".gate_up_proj." in name:
        return [(name.replace("gate_up_proj", part), config.intermediate_size) for part in ("gate_proj", "up_proj")]
    return [(name, None)]


def file_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a file of this configuration must have, except the vocabulary maps."""
    with ShapesOnly():
        network = EagleDrafter(config).state_dict()
    shapes = {}
    for network_name, tensor in network.items():
        if network_name in VOCABULARY_MAPS:
            continue
        for name, rows in file_parts(network_name, config):
            shapes[name] = tuple(tensor.shape) if rows is None else (rows, *tensor.shape[1:])
    return shapes


def to_network(tensors: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """The network's state from a file's tensors, in which `tensor_problems` found nothing."""
    with ShapesOnly():
        names = list(EagleDrafter(config).state_dict())
    state = {}
    for network_name in names:
        if network_name == "d2t":
            zeros = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            state["d2t"] = tensors["d2t"].to(torch.int64) if "d2t" in tensors else zeros
        else:
            parts = [tensors[name] for name, _ in file_parts(network_name, config)]
            state[network_name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return state


def to_file(drafter: EagleDrafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The file's tensors from a network, with the vocabulary maps if the vocabularies differ."""
    config, tensors = drafter.config, {}
    for network_name, tensor in drafter.state_dict().items():
        if network_name in VOCABULARY_MAPS:
            continue
        parts = file_parts(network_name, config)
        pieces = [tensor] if len(parts) == 1 else tensor.split([rows for _, rows in parts])
        for (name, _), piece in zip(parts, pieces, strict=True):
            tensors[name] = piece.detach().to("cpu", dtype).clone()
    if config.draft_vocab_size < config.vocab_size or drafter.d2t.any():
        d2t = drafter.d2t.detach().to("cpu", torch.int64).clone()
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[torch.arange(config.draft_vocab_size) + d2t] = True
        tensors |= {"d2t": d2t, "t2d": t2d}
    return tensors


def tensor_problems(tensors: Mapping[str, Tensor], config: DrafterConfig) -> list[str]:
    """All contradictions between a file's tensors and its configuration."""
    problems = []
    expected = file_shapes(config)
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected and name not in VOCABULARY_MAPS]
    for prefix, flag in _FLAG_OF_TENSOR.items():
        without_weights = [name for name in missing if name.startswith(prefix)]
        without_flag = [name for name in extra if name.startswith(prefix)]
        if without_weights:
            problems.append(f"config.json sets {flag} but the weights lack {listed(without_weights)}")
        if without_flag:
            problems.append(
                f"the weights have {listed(without_flag)} but config.json does not set {flag}: "
                f'set "{flag}": true at its top level if the drafter was trained so'
            )
        missing = [name for name in missing if name not in without_weights]
        extra = [name for name in extra if name not in without_flag]
    if missing:
        problems.append(f"missing tensors: {listed(missing)}")
    if extra:
        problems.append(f"unknown tensors: {listed(extra)}")
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}; config.json asks for {list(shape)}")
    for name in expected:
        if name in tensors and not tensors[name].is_floating_point():
            problems.append(f"{name} is {tensors[name].dtype}; quantised drafters are not supported")
        elif name in tensors and not _is_finite(tensors[name]):
            # A single such value makes the probabilities of every draft NaN, and sampled requests fail.
            problems.append(
                f"{name} has values that are not finite (NaN or infinity): training diverged or the file is damaged"
            )
    return problems + vocabulary_problems(tensors, config)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. Checks min and max (NaN if any is): `torch.isfinite` needs twice the tensor's memory."""
    return not tensor.numel() or all(map(math.isfinite, map(float, tensor.aminmax())))


def vocabulary_problems(tensors: Mapping[str, Tensor], config: DrafterConfig) -> list[str]:
    """Problems of the vocabulary maps. `d2t`: offsets (target id = i + d2t[i]). `t2d`: mask of target ids with a draft id."""
    num_draft, num_target = config.draft_vocab_size, config.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if num_draft < num_target:
            hint = "" if t2d is None else " (t2d is there: run `fledge import` to rebuild d2t from it)"
            return [f"draft_vocab_size {num_draft} < vocab_size {num_target} but the weights lack d2t{hint}"]
        return []
    if tuple(d2t.shape) != (num_draft,):
        return [f"d2t has shape {list(d2t.shape)}; draft_vocab_size asks for [{num_draft}]"]
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        return [f"d2t is {d2t.dtype}; it must hold integers"]
    problems = []
    d2t = d2t.to(torch.int64)
    targets = torch.arange(num_draft) + d2t
    absolute = " (it seems to have target ids instead of offsets: subtract 0, 1, 2, …)" if _is_absolute(d2t) else ""
    outside = (targets < 0) | (targets >= num_target)
    if outside.any():
        where = int(outside.nonzero()[0])
        problems.append(
            f"d2t points outside the target's vocabulary of {num_target} for {int(outside.sum())} draft ids, "
            f"first draft id {where} -> {int(targets[where])}{absolute}"
        )
    elif (repeated := num_draft - int(targets.unique().numel())) > 0:
        problems.append(f"d2t maps {repeated} draft ids to a target id that another draft id also has{absolute}")
    if t2d is not None and tuple(t2d.shape) != (num_target,):
        problems.append(f"t2d has shape {list(t2d.shape)}; vocab_size asks for [{num_target}]")
    elif t2d is not None and not outside.any():
        marked = torch.zeros(num_target, dtype=torch.bool)
        marked[targets] = True
        differing = int((marked != t2d.to(torch.bool)).sum())
        if differing:
            problems.append(
                f"d2t and t2d disagree about {differing} target ids{absolute}: "
                "one of them comes from another vocabulary; take both from the run that trained the weights"
            )
    return problems


def _is_absolute(d2t: Tensor) -> bool:
    return d2t.numel() > 1 and bool((d2t[1:] > d2t[:-1]).all())
