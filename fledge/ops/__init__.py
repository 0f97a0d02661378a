"""The backends that run a network's operations: `torch_ops` is the reference, `cpu_ops` and `cuda_ops` are the fast ones."""
