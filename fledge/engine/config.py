"""How an engine runs. `auto` values are resolved once, against the model and the machine, into a new object."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fledge.errors import UserError

if TYPE_CHECKING:
    import torch

    from fledge.config import DrafterConfig, ModelConfig

# Whatever needs torch is imported by the methods: the server's HTTP processes read flags into this, and have no torch.

# Of the memory that is free when the weights are loaded: the rest is for graphs and libraries.
CACHE_SHARE = 0.85
DTYPES = ("float32", "float16", "bfloat16")
QUANTIZATIONS = ("none", "int8", "int4", "gguf")


def check_quantization(name: str) -> str:
    if name not in QUANTIZATIONS:
        raise UserError(
            f"--quantization {name}: not supported; use int8 or int4 (made from the weights as they are loaded), "
            "gguf (a GGUF file's own, kept) or none. Checkpoints of AWQ, GPTQ and the like are not read: give the original"
        )
    return name


@dataclass(frozen=True)
class EngineConfig:
    device: str = "auto"  # cpu | cuda | cuda:1 …
    dtype: str = "auto"  # of the weights: auto | float32 | float16 | bfloat16
    quantization: str = "none"  # of the target's linears: none | int8 | int4 | gguf (see kernels/quantization.py)
    max_model_len: int = 0  # longest prompt + answer; 0: the model's own limit
    max_num_seqs: int = 0  # requests decoded together; 0: 64 on CPU, 256 on GPU
    max_batched_tokens: int = 0  # tokens a step; longer prompts are read in chunks; 0: 512 on CPU, 8192 on GPU
    kv_cache_tokens: int = 0  # room in the cache; 0: all requests at full length, as far as memory allows
    page_size: int = 16
    prefix_caching: bool = True  # texts that begin alike share pages
    deterministic: bool = False  # answers that do not depend on the batch, on how prompts are cut, or on speculation
    threads: int = 0  # CPU threads; 0: torch's choice

    def resolve(self, model: ModelConfig) -> EngineConfig:
        from fledge.devices import resolve_device
        from fledge.kernels import native
        from fledge.kernels.linear.packed import packing_supported

        device = resolve_device(self.device)
        kind = device.type
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"dtype {self.dtype!r} is not supported; use auto, {', '.join(DTYPES)}")
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if kind == "cuda" else ("float16" if packing_supported() else "float32")
        if kind == "cpu" and dtype == "bfloat16":
            raise UserError("bfloat16 is not supported on CPU; use --dtype float16 (packed weights) or float32")
        if kind == "cpu" and dtype == "float16" and not packing_supported():
            raise UserError("float16 needs packed CPU weights, which this machine lacks; use --dtype float32")
        if check_quantization(self.quantization) != "none" and kind == "cpu" and native.library() is None:
            raise UserError(
                f"--quantization {self.quantization} on CPU needs a C compiler (gcc, clang, or `pip install ziglang`); "
                "install one, or leave it out"
            )
        longest = self.max_model_len or model.max_positions
        if longest > model.max_positions:
            raise UserError(
                f"max_model_len {longest} is beyond the model's {model.max_positions} positions; "
                "lower it, or set rope scaling in the model's config.json"
            )
        return replace(
            self,
            device=str(device),
            dtype=dtype,
            max_model_len=longest,
            max_num_seqs=self.max_num_seqs or (64 if kind == "cpu" else 256),
            max_batched_tokens=self.max_batched_tokens or (512 if kind == "cpu" else 8192),
        )

    def with_cache(self, model: ModelConfig, drafter: DrafterConfig | None = None) -> EngineConfig:
        """Sizes the KV cache from the memory that is free now: call it when the weights are on the device."""
        return self if self.kv_cache_tokens else replace(self, kv_cache_tokens=self._cache_tokens(model, drafter))

    @property
    def weight_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def weights(self) -> str:
        """In words."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, target {self.quantization}"

    @property
    def activation_dtype(self) -> torch.dtype:
        """On CPU everything between the linears stays fp32, whatever the weights are packed to."""
        import torch

        return torch.float32 if torch.device(self.device).type == "cpu" else self.weight_dtype

    def _cache_tokens(self, model: ModelConfig, drafter: DrafterConfig | None) -> int:
        import torch

        from fledge.kernels.attention.paged import PagedKV

        shapes = [(model.num_layers, model.num_kv_heads, model.head_dim)]
        if drafter is not None:
            shapes.append((drafter.num_layers, drafter.num_kv_heads, drafter.head_dim))
        per_token = sum(PagedKV.bytes_per_token(*shape, self.activation_dtype) for shape in shapes)
        if torch.device(self.device).type == "cpu":
            # Untouched pages cost nothing: the memory is taken from the system as it is first written.
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        else:
            memory = int(torch.cuda.mem_get_info(self.device)[0] * CACHE_SHARE) - self._step_bytes(model)
        tokens = min(self.max_num_seqs * self.max_model_len, max(memory, 0) // per_token)
        if tokens < self.max_model_len:
            raise UserError(
                f"a request of {self.max_model_len} tokens needs {self.max_model_len * per_token / 2**30:.1f} GiB of cache "
                f"and {max(memory, 0) / 2**30:.1f} GiB are left; lower --max-model-len to {tokens} or less"
            )
        return tokens

    def _step_bytes(self, model: ModelConfig) -> int:
        """What a step works with beside weights and cache: activations of a prefill, and logits of the largest batch."""
        activations = 50 * model.hidden_size * self.max_batched_tokens
        logits = 4 * model.vocab_size * min(8 * self.max_num_seqs, 1024)
        return activations + logits
