"""Layers grouped into scans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.config import config_from_dict
from tests.torch_ref.configs import tiny_config


def segments_of(ratios: tuple[int, ...], num_hash_layers: int):
    released = tiny_config(compress_ratios=ratios, num_hash_layers=num_hash_layers).to_released()
    cfg = config_from_dict(released)
    return cfg, cfg.segments


@given(st.lists(st.sampled_from([0, 4, 8]), min_size=1, max_size=12).map(tuple), st.data())
def test_segments_are_the_layers_in_order(ratios, data):
    cfg, segments = segments_of(ratios, data.draw(st.integers(0, len(ratios))))
    assert sum((segment.pattern * segment.count for segment in segments), ()) == cfg.layers


def test_published_schedules_need_few_programs():
    """Flash and Pro: what is traced, and compiled, is a handful of layers and not 43 or 61."""
    for ratios in ((0, 0) + (4, 8) * 20 + (4,), (8, 8) + (4, 8) * 29 + (4,)):
        _, segments = segments_of(ratios, 3)
        assert sum(len(segment.pattern) for segment in segments) <= 5
