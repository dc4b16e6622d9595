"""Layers grouped into scans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.config import ModelConfig, config_from_dict
from tests.torch_ref.configs import tiny_config


def config_of(ratios: tuple[int, ...], num_hash_layers: int) -> ModelConfig:
    cfg = tiny_config(compress_ratios=ratios, num_hash_layers=num_hash_layers)
    return config_from_dict(cfg.to_released())


@given(st.lists(st.sampled_from([0, 4, 8]), min_size=1, max_size=12).map(tuple), st.data())
def test_segments_are_the_layers_in_order(ratios, data):
    cfg = config_of(ratios, data.draw(st.integers(0, len(ratios))))
    assert sum((s.pattern * s.count for s in cfg.segments), ()) == cfg.layers
    assert sum((s.pattern * s.count for s in cfg.attention_segments), ()) == cfg.attention_kinds


def test_published_schedules_need_few_programs():
    """Flash and Pro: what is traced, and compiled, is a handful of layers and not 43 or 61."""
    for ratios in ((0, 0) + (4, 8) * 20 + (4,), (8, 8) + (4, 8) * 29 + (4,)):
        segments = config_of(ratios, 3).attention_segments
        assert sum(len(segment.pattern) for segment in segments) <= 4
