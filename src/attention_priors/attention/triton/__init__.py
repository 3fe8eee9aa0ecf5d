"""CUDA engine: fused Triton kernels, forward and backward."""
