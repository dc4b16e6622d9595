"""DeepSeek-V4 inference in JAX with DSpark drafting and adaptive verification."""

__version__ = "0.1.0"
