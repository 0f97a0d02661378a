"""The fastest launch config of a linear by its shape and number of rows, measured on an H200.

Written by `benchmarks/gpu_linears.py --fill` from a run's file. Shapes that are not listed use the rules of `dispatch`.
"""

from __future__ import annotations

# (inputs, outputs, gated): for up to so many rows, the kernel and the numbers of its config (empty: the kernel chooses).
#   register_mma     rows per program; whether a thread loads eight weights at once
#   staged_mma       fields of `staged_mma.LaunchConfig`
#   tiles            fields of `tiles.Tile`; whether slices are programs of their own
#   tma_tiles        fields of `tma_tiles.LaunchConfig`
#   cublas           none
CONFIGS: dict[tuple[int, int, bool], tuple[tuple[int, str, tuple[int, ...]], ...]] = {
    (576, 960, False): (
        (1, "register_mma", (8, 0)),
        (4, "register_mma", ()),
        (16, "register_mma", (8, 0)),
        (32, "register_mma", (16, 0)),
        (64, "staged_mma", (32, 32, 1)),
        (128, "staged_mma", (32, 32, 1)),
        (256, "tiles", (64, 128, 64, 4, 5, 1)),
    ),
    (576, 576, False): (
        (4, "register_mma", (8, 0)),
        (16, "register_mma", ()),
        (32, "staged_mma", (16, 32, 2)),
        (64, "staged_mma", (32, 16, 1)),
        (128, "staged_mma", (32, 32, 2)),
        (256, "tiles", (64, 32, 64, 4, 6, 0)),
    ),
    (576, 3072, True): (
        (4, "register_mma", (8, 1)),
        (16, "staged_mma", (16, 32, 2)),
        (32, "register_mma", (16, 1)),
        (64, "staged_mma", ()),
        (128, "tiles", (64, 32, 64, 4, 6, 0)),
        (256, "tiles", ()),
    ),
    (1536, 576, False): (
        (1, "register_mma", ()),
        (4, "register_mma", (8, 0)),
        (16, "register_mma", (16, 1)),
        (32, "register_mma", (16, 1)),
        (64, "staged_mma", ()),
        (128, "tiles", (64, 64, 64, 4, 6, 1)),
        (256, "tiles", (128, 64, 64, 4, 5, 1)),
    ),
    (576, 49152, False): (
        (4, "tiles", (64, 16, 128, 4, 3, 0)),
        (16, "tiles", (64, 16, 64, 4, 6, 0)),
        (64, "tiles", (64, 64, 128, 4, 4, 0)),
    ),
    (1728, 576, False): (
        (16, "tiles", ()),
        (64, "tiles", (64, 32, 64, 4, 6, 1)),
        (256, "tiles", (64, 64, 64, 4, 4, 1)),
    ),
    (1152, 960, False): (
        (4, "register_mma", (16, 1)),
        (16, "staged_mma", (16, 16, 1)),
        (64, "tiles", (64, 32, 64, 4, 6, 1)),
        (256, "tiles", (64, 32, 64, 4, 6, 0)),
    ),
    (576, 8192, False): (
        (4, "tiles", (64, 16, 64, 4, 6, 0)),
        (16, "tiles", (64, 16, 128, 4, 5, 0)),
        (64, "tiles", (128, 64, 64, 4, 4, 0)),
    ),
    (4608, 1536, False): (
        (16, "tiles", (16, 16, 128, 4, 4, 0)),
        (64, "tiles", (64, 64, 64, 4, 6, 1)),
        (256, "tiles", (64, 64, 64, 4, 4, 1)),
    ),
    (3072, 2048, False): (
        (16, "tiles", (16, 16, 128, 4, 4, 0)),
        (256, "tiles", ()),
    ),
    (1536, 32000, False): (
        (16, "tiles", (64, 16, 128, 4, 5, 0)),
        (64, "tiles", (128, 64, 64, 4, 4, 0)),
    ),
    (1536, 2048, False): (
        (4, "register_mma", (16, 1)),
        (8, "register_mma", (8, 1)),
        (16, "register_mma", ()),
        (64, "tiles", ()),
        (256, "tma_tiles", (64, 64, 4, 6, 0, 2)),
        (1024, "tma_tiles", (64, 128, 4, 4, 0, 2)),
        (1048576, "tma_tiles", (128, 128, 8, 6, 0, 1)),
    ),
    (1536, 1536, False): (
        (4, "register_mma", ()),
        (8, "register_mma", (8, 0)),
        (16, "register_mma", (16, 1)),
        (64, "tiles", ()),
        (256, "tma_tiles", (64, 64, 4, 6, 0, 2)),
        (1048576, "tma_tiles", (64, 128, 4, 4, 0, 2)),
    ),
    (1536, 17920, True): (
        (1, "tiles", ()),
        (16, "tiles", (64, 16, 128, 4, 3, 0)),
        (64, "tiles", ()),
        (1048576, "cublas", ()),
    ),
    (8960, 1536, False): (
        (16, "tiles", (32, 16, 64, 4, 8, 1)),
        (64, "tiles", ()),
        (256, "tma_tiles", (128, 128, 8, 6, 1, 1)),
        (1048576, "tma_tiles", (128, 128, 8, 6, 0, 1)),
    ),
    (1536, 151936, False): (
        (4, "tiles", (64, 16, 128, 4, 5, 0)),
        (16, "tiles", (64, 16, 128, 4, 3, 0)),
        (64, "tiles", (128, 64, 64, 4, 4, 0)),
    ),
    (4096, 6144, False): (
        (16, "tiles", ()),
        (64, "tiles", (64, 64, 128, 4, 4, 0)),
        (1048576, "cublas", ()),
    ),
    (4096, 4096, False): (
        (1, "tiles", (64, 16, 128, 4, 5, 0)),
        (16, "tiles", ()),
        (64, "tiles", (64, 32, 128, 4, 5, 0)),
        (256, "tiles", (64, 64, 64, 4, 6, 0)),
        (1048576, "cublas", ()),
    ),
    (4096, 28672, True): (
        (16, "tiles", ()),
        (64, "tiles", (128, 64, 64, 4, 4, 0)),
        (1048576, "cublas", ()),
    ),
    (14336, 4096, False): (
        (64, "tiles", ()),
        (256, "tma_tiles", (128, 128, 8, 6, 1, 1)),
        (1048576, "tma_tiles", (128, 256, 8, 4, 2, 1)),
    ),
    (4096, 128256, False): (
        (1, "tiles", (32, 16, 128, 4, 4, 0)),
        (16, "tiles", (64, 16, 128, 4, 3, 0)),
        (64, "tiles", (128, 64, 64, 4, 4, 0)),
    ),
}
