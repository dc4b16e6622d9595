"""Every kernel at the published sizes can be expressed in the Triton lowering, checked on any host."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.expert_mlp import expert_mlp
from dspark_jax.kernels.linear import stacked_linear
from tests.kernels.cuda import lower_for_cuda, num_kernels
from tests.kernels.published import floats, halves, ints, problems, weight


@pytest.mark.parametrize("tokens", [1, 48, 2048])
@pytest.mark.parametrize("name", problems(1))
def test_every_kernel_lowers_at_published_sizes(name: str, tokens: int) -> None:
    function, arguments, kernels = problems(tokens)[name]
    text = lower_for_cuda(function, arguments)
    # Scores over long contexts are made in turns: the loop's body appears once.
    assert num_kernels(text) == kernels


def experts(storage: str, layers: int) -> dict[str, Any]:
    """Abstract arguments of Flash's experts for a few tokens."""
    return {
        "x": halves(8, 4096),
        "expert_ids": ints(8, 6),
        "weights": floats(8, 6),
        "w_gate_up": weight(storage, layers, 256, 4096, 4096),
        "w_down": weight(storage, layers, 256, 4096, 2048),
    }


def lower_experts(storage: str, layers: int) -> str:
    dispatch = Dispatch(Backend.PALLAS)
    return lower_for_cuda(
        lambda tree: expert_mlp(**tree, layer=jnp.int32(0), limit=10.0, dispatch=dispatch),
        experts(storage, layers),
    )


def test_a_layer_is_cut_from_a_one_byte_stack_beyond_the_offsets() -> None:
    """100 layers of Flash's w_o_a are 100 * 2**25 bytes, 140 of them more than 2**32."""
    for layers, is_cut in ((60, False), (100, True), (140, False)):
        text = lower_for_cuda(
            lambda x, stack: stacked_linear(
                x, stack, layer=jnp.int32(0), dispatch=Dispatch(Backend.PALLAS)
            ),
            halves(8, 8, 4096),
            weight("fp8", layers, 8192, 4096),
        )
        assert num_kernels(text) == 1
        assert ("-> tensor<1x8192x4096xf8E4M3FN>" in text) == is_cut


def test_packed_experts_are_read_where_they_lie() -> None:
    """Three layers of w2 are 3 * 2**30 bytes, of w1 and w3 6 * 2**30: words of two bytes are always reached."""
    text = lower_experts("fp4", 3)
    assert num_kernels(text) == 4
    assert "tensor<1x256x4096x" not in text


def test_one_byte_layer_beyond_the_offsets_is_refused() -> None:
    with pytest.raises(ValueError, match="overflows 32-bit offsets"):
        lower_experts("fp8", 1)
