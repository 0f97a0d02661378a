"""The engine's settings. `auto` values are resolved once, against the model and the machine, into a new object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fledge.errors import UserError

if TYPE_CHECKING:
    import torch

    from fledge.config import DrafterConfig, ModelConfig

# Imports that need torch are inside the methods: the server's HTTP processes parse flags into this class and do not load torch.

DTYPES = ("float32", "float16", "bfloat16")
CPU_CACHE_DTYPES = ("float32", "float16", "q8_0")
# Tokens per KV page. On a GPU each block of keys that the attention kernel reads lies in one page.
CPU_PAGE_SIZE, DEVICE_PAGE_SIZE = 16, 128
# Size fields and their flags, for error messages.
SIZES = {
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_batched_tokens": "--max-num-batched-tokens",
    "kv_cache_tokens": "--kv-cache-tokens",
    "page_size": "--block-size",
    "threads": "--threads",
}
QUANTIZATIONS = ("none", "fp8", "int8", "int4", "gguf")


def check_quantization(name: str) -> str:
    if name not in QUANTIZATIONS:
        raise UserError(
            f"--quantization {name}: not supported; use fp8 (on a GPU), int8 or int4 (made from the weights when they are "
            "loaded), gguf (a GGUF file's own, kept) or none (also for a checkpoint that is quantised already, which stays so)"
        )
    return name


def check_head_size(kv_cache_dtype: str, head_dim: int) -> None:
    from fledge.kernels.formats import kv_cache

    if kv_cache_dtype == "q8_0" and head_dim % kv_cache.BLOCK:
        raise UserError(
            f"--kv-cache-dtype q8_0 takes heads whose size is a multiple of {kv_cache.BLOCK}, not {head_dim}; use float16"
        )


@dataclass(frozen=True)
class EngineConfig:
    device: str = "auto"  # cpu | cuda | cuda:1 …
    dtype: str = "auto"  # of the weights: auto | float32 | float16 | bfloat16
    quantization: str = "none"  # of the target's linears: none | fp8 | int8 | int4 | gguf (see kernels/quantization.py)
    max_model_len: int = 0  # longest prompt + answer; 0: the model's own limit
    max_num_seqs: int = 0  # requests decoded together; 0: 64 on CPU, 256 on GPU
    max_batched_tokens: int = 0  # tokens per step; longer prompts are prefilled in chunks; 0: 256 on CPU, 8192 on GPU
    kv_cache_tokens: int = 0  # tokens the KV cache holds; 0: all requests at full length, as far as memory allows
    kv_cache_dtype: str = "auto"  # of keys and values: auto | float32 | float16 | q8_0; on a GPU only the activations' dtype
    gpu_memory_utilization: float = 0.0  # share of the GPU's memory for the whole engine; 0: the free memory minus a reserve
    page_size: int = 0  # tokens per KV page; 0: 16 on CPU, 128 on GPU
    prefix_caching: bool = True  # texts with a common prefix share its pages
    deterministic: bool = False  # refuses draft trees; without a C compiler uses the slower, exact reference kernels
    threads: int = 0  # CPU threads; 0: torch's choice
    reserved_bytes: int = 0  # GPU memory that the KV cache must leave free

    def _check_sizes(self) -> None:
        for name, flag in SIZES.items():
            if (value := getattr(self, name)) < 0:
                raise UserError(f"{flag} must be positive, or 0 for the default, not {value}")

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """Returns a copy with every `auto` and 0 replaced by a value for this model and machine; refuses what cannot work."""
        from fledge.devices import resolve_device
        from fledge.kernels import native
        from fledge.kernels.formats.fp8 import reads_fp8
        from fledge.kernels.linear.packed import packing_supported

        self._check_sizes()
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
        if self.quantization == "fp8" and not reads_fp8(device):
            raise UserError("--quantization fp8 needs a GPU (NVIDIA Ada, Hopper or newer); use int8 or int4")
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise UserError(f"--gpu-memory-utilization is a share from 0 to 1, not {self.gpu_memory_utilization}")
        if self.gpu_memory_utilization and kind == "cpu":
            raise UserError("--gpu-memory-utilization needs a GPU; on CPU give --kv-cache-tokens")
        if kind == "cuda" and self.page_size & (self.page_size - 1):
            raise UserError(f"--block-size {self.page_size} is not possible on a GPU: its attention takes a power of two")
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
            kv_cache_dtype=self._cache_dtype(kind, dtype, model.head_dim),
            max_model_len=longest,
            max_num_seqs=self.max_num_seqs or (64 if kind == "cpu" else 256),
            # A prefill chunk delays all running requests: on two cores 512 tokens of a 0.5B target took 0.36 s.
            max_batched_tokens=self.max_batched_tokens or (256 if kind == "cpu" else 8192),
            page_size=self.page_size or (CPU_PAGE_SIZE if kind == "cpu" else DEVICE_PAGE_SIZE),
        )

    def _cache_dtype(self, device: str, dtype: str, head_dim: int) -> str:
        from fledge.kernels import native

        name = self.kv_cache_dtype
        if device == "cuda":
            if name not in ("auto", dtype):
                raise UserError(
                    f"--kv-cache-dtype {name} is not possible on a GPU: the cache has the activations' type, {dtype}; leave it "
                    "out, or use --engine vllm"
                )
            return dtype
        if name == "auto":  # with weights of 16 bits or fewer, a 16-bit cache loses less precision than they do, and is faster
            return "float16" if dtype == "float16" and native.library() is not None else "float32"
        if name not in CPU_CACHE_DTYPES:
            raise UserError(f"--kv-cache-dtype {name} is not supported on CPU; use auto, {', '.join(CPU_CACHE_DTYPES)}")
        if name != "float32" and native.library() is None:
            raise UserError(
                f"--kv-cache-dtype {name} on CPU needs a C compiler (gcc, clang, or `pip install ziglang`); install one, or "
                "leave it out"
            )
        check_head_size(name, head_dim)
        return name

    def with_cache(self, model: ModelConfig, drafter: DrafterConfig | None = None) -> EngineConfig:
        """Sizes the KV cache from the memory that is free now: call it once the weights are on the device."""
        from fledge.engine.memory import cache_tokens

        return self if self.kv_cache_tokens else replace(self, kv_cache_tokens=cache_tokens(self, model, drafter))

    @property
    def is_cpu(self) -> bool:
        """Whether the engine runs on a CPU. Valid once `device` is resolved."""
        return self.device.startswith("cpu")

    @property
    def weight_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def weights(self) -> str:
        """The weights' type as text for the log."""
        if self.quantization == "gguf":
            return "the GGUF file's own blocks"
        return self.dtype if self.quantization == "none" else f"{self.dtype}, target {self.quantization}"

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of activations. On CPU they are fp32 between the linears, whatever the weights are packed to."""
        import torch

        return torch.float32 if self.is_cpu else self.weight_dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the KV cache's tensors; uint8 holds Q8_0 blocks."""
        from fledge.kernels.formats import kv_cache

        return kv_cache.KV_DTYPES[self.kv_cache_dtype]
