"""Checkpoints: released safetensors folders, orbax stores, and conversion between them."""
