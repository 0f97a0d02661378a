"""Reads and writes the tensors of a folder (one safetensors file, or shards with an index) and its JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fledge.errors import ModelError, printable
from fledge.files import save_tensors, write_json

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 256 << 20
SHARD_BYTES = 2 << 30  # also the memory that writing needs


class TensorReader:
    """Reads tensors one by one from a folder's memory-mapped safetensors files."""

    def __init__(self, folder: Path, names: Callable[[str], str | None] = lambda name: name) -> None:
        """`names`: maps a tensor's name in the file to the name used here; None: the tensor is skipped."""
        self.folder, self._names = folder, names
        self._stack = ExitStack()
        self._owners: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._in_file: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            for file, wanted in self._files():
                self._open(file, wanted)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        try:
            return self._owners[name].get_tensor(self._in_file[name])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.folder}: tensor {name} cannot be read ({error}); fetch the model again") from None

    def _files(self) -> Iterator[tuple[Path, list[str] | None]]:
        """Yields each file with the tensors that the index expects in it (None: no index)."""
        index = self.folder / INDEX
        if index.exists():
            yield from ((self.folder / file, names) for file, names in sorted(read_index(index).items()))
            return
        single = self.folder / "model.safetensors"
        files = [single] if single.exists() else sorted(self.folder.glob("*.safetensors"))
        files = [file for file in files if not file.name.startswith("consolidated")]  # a second copy in Mistral's format
        if not files:
            pickled = any(self.folder.glob("pytorch_model*.bin"))
            hint = "it has only pickled weights: convert them to safetensors" if pickled else "fetch the model again"
            raise ModelError(f"{self.folder}: no .safetensors file in it; {hint}")
        yield from ((file, None) for file in files)

    def _open(self, file: Path, wanted: Sequence[str] | None) -> None:
        if not file.exists():
            raise ModelError(f"{file}: named by the index but missing; fetch the model again")
        if not file.is_file():  # reading a pipe would block forever
            raise ModelError(f"{file}: not a plain file; fetch the model again")
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
            names = list(opened.keys())
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file}: damaged or truncated ({error}); fetch the model again") from None
        if lacking := [name for name in wanted or () if name not in shapes]:
            raise ModelError(f"{file}: the index names tensors that it lacks: {listed(lacking)}")
        for name in names:
            if (known := self._names(name)) is not None:
                self.shapes[known], self._owners[known], self._in_file[known] = shapes[name], opened, name


class ShapesOnly(TorchFunctionMode):
    """A context in which networks are built without memory or initial values, to be filled from a file.

    `torch.device("meta")` does the same, but imports torch's compiler, which costs 2 s and 130 MB.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func in (torch.empty, torch.ones, torch.zeros):
            return torch.empty(*args, **kwargs | {"device": "meta"})
        return func(*args, **kwargs)


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block forever
            raise ModelError(f"{path}: not a plain file; fetch the model again")
        if path.exists() and path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB; fetch the model again")
        content = json.loads(path.read_text(encoding="utf-8"))
    except ModelError:
        raise
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: no {path.name} in it; give a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); fetch the model again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds no JSON object; fetch the model again")
    return content


def read_index(index: Path) -> dict[str, list[str]]:
    """The names of the tensors in each file of a sharded checkpoint."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map in it; fetch the model again")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index}: names {printable(repr(file), 80)}, which is not a file beside it")
        by_file.setdefault(file, []).append(name)
    return by_file


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes tensors as they arrive: one `model.safetensors`, or shards with an index. The index (or file) is written last."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def write_shard() -> None:
        save_tensors(pending, folder / f"model.{len(shards)}.partial")
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and size + sum(t.numel() * t.element_size() for t in pending.values()) > shard_bytes:
            write_shard()
        pending[name] = tensor.contiguous()
        total += size
    write_shard()
    if len(shards) == 1:
        os.replace(folder / "model.0.partial", folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(folder / f"model.{number}.partial", folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first `most` names as text, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
