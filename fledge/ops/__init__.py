"""What a layer needs, by backend: `torch_ops` is the reference, `cpu_ops` and `cuda_ops` are the fast ones."""
