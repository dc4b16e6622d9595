"""Tiny models whose parity is tested and reported, each exercising something that the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "every kind of layer": {},
    "schedule of Pro, clamp bites, three picks": {
        "compress_ratios": (8, 8, 4, 8, 4, 8),
        "swiglu_limit": 0.3,
        "index_topk": 3,
        "num_hash_layers": 2,
    },
    "window only, no hash layer": {
        "compress_ratios": (0, 0),
        "sliding_window": 5,
        "num_hash_layers": 0,
    },
    "HCA only, every layer hashed": {"compress_ratios": (8, 8, 8), "num_hash_layers": 3},
    "CSA at 2 with picks to spare, HCA at 16, no YaRN": {
        "compress_ratios": (2, 16),
        "csa_compress_ratio": 2,
        "index_topk": 100,
        "rope_scaling": None,
    },
}
"""Overrides of `tests.torch_ref.configs.tiny_config`."""
