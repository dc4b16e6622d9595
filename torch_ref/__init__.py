"""Readable float32 PyTorch reference of DeepSeek-V4 and the DSpark drafters.

One request at a time, no batching tricks, no kernels: the definition the JAX implementation is
tested against. Weights are flat dictionaries from published tensor names to float32 tensors.
"""
