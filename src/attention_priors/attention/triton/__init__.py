"""CUDA backend: fused Triton kernels for the forward and backward pass."""
