"""On a GPU: compiled kernels against their references, the tiny cases and random data at Flash and Pro sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.compress import cases as compress_cases
from dspark_jax.kernels.compress import compress
from dspark_jax.kernels.dispatch import Backend, Dispatch, default_dispatch
from dspark_jax.kernels.expert_mlp import cases as expert_cases
from dspark_jax.kernels.expert_mlp import expert_mlp
from dspark_jax.kernels.hyper import cases as hyper_cases
from dspark_jax.kernels.hyper import hyper_enter, hyper_leave
from dspark_jax.kernels.index_topk import cases as index_cases
from dspark_jax.kernels.index_topk import index_topk
from dspark_jax.kernels.latent_rows import cases as latent_cases
from dspark_jax.kernels.latent_rows import finish_rows, store_rows
from dspark_jax.kernels.linear import cases as linear_cases
from dspark_jax.kernels.linear import stacked_linear
from dspark_jax.kernels.linear.pallas_triton import MANY_TOKENS
from dspark_jax.kernels.quantized import pack_fp4_scale
from dspark_jax.kernels.router import cases as router_cases
from dspark_jax.kernels.router import route
from dspark_jax.kernels.rows import RowFormat, as_stored, decode, empty_rows, gather
from dspark_jax.kernels.sparse_mla import cases as mla_cases
from dspark_jax.kernels.sparse_mla import sparse_mla
from tests.parity.compare import BFLOAT16_OP, Tolerance, assert_close
from tests.seeds import fresh_seed

pytestmark = pytest.mark.gpu

formats = pytest.mark.parametrize(
    "row_format", [RowFormat.PLAIN, RowFormat.FP8], ids=["plain", "fp8"]
)

FLOAT32_GPU = Tolerance(1e-4, 1e-4, 1e-9)
"""Float32 throughout, with the GPU's approximate exponentials and reciprocals."""

FLOAT16_OPERANDS = Tolerance(2.5e-2, 3e-3, 1e-6)
"""Activations beside quantised weights, and the rows of single experts, are rounded to float16.

At Pro size the worst of seven million values was 0.017 off.
"""

MIXING_WEIGHTS = Tolerance(2e-4, 2e-4, 1e-7)
"""Sums of 16384 or 28672 products that are exact to 16 bits."""


@pytest.fixture(autouse=True)
def exact_references() -> Iterator[None]:
    """References in float32 must not use the matrix units' 10-bit mode."""
    with jax.default_matmul_precision("highest"):
        yield


def both(
    function: Any, arguments: dict[str, Any], *, by_operation: bool = False
) -> tuple[Any, Any]:
    """Result of the compiled kernel and of the reference. Leaves that are no arrays are fixed.

    With `by_operation` the reference is not compiled as a whole: XLA would skip roundings between its operations.
    """
    is_array = lambda x: any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
    arrays = {k: v for k, v in arguments.items() if is_array(v)}
    fixed = {k: v for k, v in arguments.items() if k not in arrays}
    run = partial(function, **fixed)
    out = jax.jit(partial(run, dispatch=default_dispatch()))(**arrays)
    with jax.disable_jit(by_operation):
        return out, jax.jit(partial(run, dispatch=Dispatch()))(**arrays)


# --- sparse attention --------------------------------------------------------------------------

MLA_CASES = [
    dataclasses.replace(case, name=f"{model} {case.name}")
    for model, size, listed in (
        ("flash", mla_cases.FLASH, 512),
        ("pro", mla_cases.PRO, 1024),
    )
    for case in (
        *(mla_cases.decode_case(n, listed=listed, **size) for n in (1, 16, 61, 256)),
        mla_cases.prefill_case(300, listed=listed, **size),
        mla_cases.Case(
            "mixed", (mla_cases.Row(0, 5), mla_cases.Row(3, 130), mla_cases.Row(900, 1)),
            listed=listed, padding=3, **size,
        ),
    )
]  # fmt: skip


@formats
@pytest.mark.parametrize("case", mla_cases.TEST_CASES, ids=lambda case: case.name)
def test_sparse_mla_tiny(case: mla_cases.Case, row_format: RowFormat) -> None:
    arguments = mla_cases.make(case, fresh_seed(), jnp.float32, row_format=row_format)
    out, expected = both(sparse_mla, arguments)
    assert_close(out, expected, FLOAT32_GPU, case.name)


@formats
@pytest.mark.parametrize("case", MLA_CASES, ids=lambda case: case.name)
def test_sparse_mla(case: mla_cases.Case, row_format: RowFormat) -> None:
    arguments = mla_cases.make(case, fresh_seed(), jnp.bfloat16, pool=16384, row_format=row_format)
    out, expected = both(sparse_mla, arguments)
    assert_close(out, expected, BFLOAT16_OP, case.name)


@formats
def test_sparse_mla_many_tokens_equal_few(row_format: RowFormat) -> None:
    """The tiles for 2048 tokens differ from those for 256; the reference would take gigabytes."""
    case = mla_cases.prefill_case(2048, **mla_cases.FLASH)
    arguments = mla_cases.make(case, fresh_seed(), jnp.bfloat16, pool=16384, row_format=row_format)
    per_token = ("q", "slots", "positions", "starts", "row_heads", "is_token")
    per_token += ("entry_places", "entry_counts", "rotation")
    whole = sparse_mla(**arguments, dispatch=default_dispatch())
    some = slice(1000, 1200)
    # The rows of the step stay; the tokens that attend are a few.
    cut = {k: jax.tree.map(lambda x: x[some], arguments[k]) for k in per_token}
    few = sparse_mla(**arguments | cut, dispatch=default_dispatch())
    assert_close(few, whole[some], BFLOAT16_OP)


# --- indexer -----------------------------------------------------------------------------------

INDEX_CASES = [
    dataclasses.replace(case, name=f"{model} {case.name}")
    for model, size in (("flash", index_cases.FLASH), ("pro", index_cases.PRO))
    for case in (
        index_cases.decode_case(16, 2048, **size),
        index_cases.decode_case(8, 40960, **size),
        index_cases.prefill_case(96, 8192, **size),
        index_cases.Case(
            "mixed", (index_cases.Row(5, 20), index_cases.Row(1, 3000), index_cases.Row(30, 1020)),
            padding=2, max_pages=64, **size,
        ),
    )
]  # fmt: skip


def check_choice(arguments: dict[str, Any], slack: float) -> None:
    """Every kept entry scores at least the k-th best, up to `slack` of the largest score; none is kept twice."""
    places, selected = jax.jit(
        partial(index_topk, k=arguments["k"], dispatch=default_dispatch()),
    )(**{name: value for name, value in arguments.items() if name != "k"})
    keys, table = arguments["index_keys"], np.asarray(arguments["page_table"])
    per_page = keys.shape[2]
    for row, (own, count) in enumerate(zip(np.asarray(places), np.asarray(arguments["counts"]))):
        kept = min(int(count), arguments["k"])
        assert int(selected[row]) == kept
        chosen = own[:kept]
        assert len(set(chosen.tolist())) == kept
        number = np.arange(count)
        flat = table[int(arguments["slots"][row]), number // per_page] * per_page
        flat = flat + number % per_page
        assert np.isin(chosen, flat).all()
        if not kept:
            continue
        rows = gather(keys, (1, flat // per_page, flat % per_page)).astype(jnp.float32)
        dots = jax.nn.relu(rows @ arguments["q"][row].astype(jnp.float32).T)
        scores = np.asarray(dots @ arguments["head_weights"][row])
        worst = scores[np.isin(flat, chosen)].min()
        assert np.sort(scores)[-kept] - worst <= slack * np.abs(scores).max()


@formats
@pytest.mark.parametrize("case", index_cases.TEST_CASES, ids=lambda case: case.name)
def test_index_topk_tiny(case: index_cases.Case, row_format: RowFormat) -> None:
    arguments = index_cases.make(case, fresh_seed(), jnp.float32, row_format=row_format)
    check_choice(arguments, 0.0 if case.ties else 1e-5)


@formats
@pytest.mark.parametrize("case", INDEX_CASES, ids=lambda case: case.name)
def test_index_topk(case: index_cases.Case, row_format: RowFormat) -> None:
    arguments = index_cases.make(case, fresh_seed(), jnp.bfloat16, row_format=row_format)
    check_choice(arguments, 1e-4)


# --- router ------------------------------------------------------------------------------------

ROUTER_CASES = [
    *router_cases.TEST_CASES,
    *(
        router_cases.Case(f"{model} {tokens} {layer}", tokens, layer=layer, hashed=True, padding=3, **size)
        for model, size in (("flash", router_cases.FLASH), ("pro", router_cases.PRO))
        for tokens in (5, 2048, 5000)
        for layer in (1, 3)
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", ROUTER_CASES, ids=lambda case: case.name)
def test_route(case: router_cases.Case) -> None:
    out, expected = both(route, router_cases.make(case, fresh_seed()))
    np.testing.assert_array_equal(out[0], expected[0])
    assert_close(out[1], expected[1], FLOAT32_GPU, case.name)


def test_nan_stays_in_its_row_of_the_router() -> None:
    arguments = router_cases.make(router_cases.Case("", 40, **router_cases.FLASH), fresh_seed())
    _, clean = both(route, arguments)
    logits = arguments["logits"].at[2].set(jnp.nan).at[6, 5].set(-jnp.nan)
    out, _ = both(route, arguments | {"logits": logits})
    others = np.delete(np.arange(40), [2, 6])
    np.testing.assert_array_equal(out[0][others], clean[0][others])
    assert_close(out[1][others], clean[1][others], FLOAT32_GPU)
    chosen = np.asarray(out[0])
    assert all(len(set(row.tolist())) == 6 for row in chosen)
    assert ((chosen >= 0) & (chosen < 256)).all()


# --- experts and linears -----------------------------------------------------------------------

EXPERT_CASES = [
    expert_cases.Case(f"{model} {tokens}", tokens, storage=storage, padding=3, layers=1,
                      **dict(size, experts=experts))
    for model, size, storage, experts, sizes in (
        ("flash", expert_cases.FLASH, "fp4", 256, (5, 64, 1024)),
        ("flash", expert_cases.FLASH, "fp4", 32, (256,)),  # tiles of 64 rows
        ("flash", expert_cases.FLASH, "fp8", 128, (5, 64, 1024)),
        ("flash", expert_cases.FLASH, "plain", 64, (5, 64, 1024)),
        ("pro", expert_cases.PRO, "fp4", 64, (5, 64, 1024)),
        ("pro", expert_cases.PRO, "fp8", 32, (5, 64, 1024)),
    )
    for tokens in sizes
]  # fmt: skip


@pytest.mark.parametrize(
    "case", expert_cases.TEST_CASES, ids=lambda case: f"{case.storage} {case.name}"
)
def test_expert_mlp_tiny(case: expert_cases.Case) -> None:
    plain = case.storage == "plain"
    arguments = expert_cases.make(case, fresh_seed(), jnp.float32 if plain else jnp.bfloat16)
    check_experts(arguments, FLOAT32_GPU if plain else FLOAT16_OPERANDS)


@pytest.mark.parametrize("case", EXPERT_CASES, ids=lambda case: f"{case.storage} {case.name}")
def test_expert_mlp(case: expert_cases.Case) -> None:
    arguments = expert_cases.make(case, fresh_seed(), jnp.bfloat16)
    check_experts(arguments, BFLOAT16_OP if case.storage == "plain" else FLOAT16_OPERANDS)


def check_experts(arguments: Any, tolerance: Tolerance) -> None:
    """Padding holds NaN for the kernel and numbers for the reference, which multiplies it by zero."""
    out = expert_mlp(**arguments, dispatch=default_dispatch())
    clean = arguments | {"x": jnp.nan_to_num(arguments["x"])}
    assert_close(out, expert_mlp(**clean, dispatch=Dispatch()), tolerance)


LINEAR_CASES = [
    linear_cases.Case(name, tokens, outputs, inner, storage, groups)
    for name, (outputs, inner, groups) in linear_cases.FLASH.items()
    for storage in ("fp8", "plain")
    for tokens in (1, 40, 300, MANY_TOKENS)
]


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda c: f"{c.storage} {c.name} {c.tokens}")
def test_linear(case: linear_cases.Case) -> None:
    out, expected = both(stacked_linear, linear_cases.make(case, fresh_seed(), jnp.bfloat16))
    assert_close(out, expected, BFLOAT16_OP, case.name)


def test_scales_beyond_float16_are_clipped() -> None:
    """As the interpreted kernel has it: scales below 2**-20 count as zero, those above 2**9 as 2**9."""
    arguments = linear_cases.make(
        linear_cases.Case("", 16, 128, 1024, "fp4"), fresh_seed(), jnp.float32
    )
    edges = np.array([0, 1, 90, 105, 106, 107, 108, 126, 135, 136, 137, 254], np.uint8)
    exponents = np.random.default_rng(fresh_seed()).choice(edges, (2, 128, 32))
    stack = arguments["stack"].replace(scale=jnp.asarray(pack_fp4_scale(exponents)))
    out, expected = (
        stacked_linear(**arguments | {"stack": stack}, dispatch=dispatch)
        for dispatch in (default_dispatch(), Dispatch(Backend.PALLAS, interpret=True))
    )
    # Sums of a thousand numbers up to 10**4, which nearly cancel here and there.
    assert_close(out, expected, Tolerance(0.5, 1e-4, 1e-8))


# --- hyper-connections and compressor ----------------------------------------------------------


@pytest.mark.parametrize("model", [4096, 7168])
@pytest.mark.parametrize("tokens", [1, 16, 200, 1024])
def test_hyper(tokens: int, model: int) -> None:
    seed = fresh_seed()
    case = hyper_cases.Case("", tokens, model)
    arguments = hyper_cases.make(case, seed, jnp.bfloat16)
    out, expected = both(hyper_enter, arguments)
    assert_close(out.block_input, expected.block_input, BFLOAT16_OP)
    assert_close(out.post, expected.post, MIXING_WEIGHTS)
    assert_close(out.comb, expected.comb, MIXING_WEIGHTS)
    back = {"streams": arguments["streams"], "post": expected.post, "comb": expected.comb}
    back["output"] = hyper_cases.make_output(case, seed, jnp.bfloat16)
    assert_close(*both(hyper_leave, back), BFLOAT16_OP)


COMPRESS_CASES = [
    *compress_cases.TEST_CASES,
    *(
        dataclasses.replace(case, name=f"{name} {case.name}")
        for name, size in (("csa", compress_cases.CSA), ("hca", compress_cases.HCA))
        for case in (
            compress_cases.decode_case(64, **size),
            compress_cases.Case("prefill", (compress_cases.Row(77, 700),), **size),
        )
    ),
]


@pytest.mark.parametrize("case", COMPRESS_CASES, ids=lambda case: case.name)
def test_compress(case: compress_cases.Case) -> None:
    arguments = compress_cases.make(case, fresh_seed())
    used = np.asarray(arguments["closing"]) < arguments["step_rows"].shape[0]
    out, expected = both(compress, arguments)
    assert np.isfinite(np.asarray(out)).all()
    assert_close(np.asarray(out)[used], np.asarray(expected)[used], FLOAT32_GPU, case.name)


# --- latent rows -------------------------------------------------------------------------------

LATENT_CASES = [
    case
    for case in (
        *latent_cases.TEST_CASES,
        latent_cases.Case("many rows", 2048, **latent_cases.ROWS),
        latent_cases.Case("many keys", 2048, **latent_cases.KEYS),
    )
    if case.width > case.rotary
]


def check_latent(out: Any, expected: Any, is_rounded: bool, tolerance: Tolerance) -> None:
    """Rounded values may lie one code apart: a few, as sums before the rounding differ in their last digit."""
    if not is_rounded:
        assert_close(out, expected, tolerance)
        return
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    # A digit lost before the rotation is as large as the larger of the pair makes it.
    largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    np.testing.assert_allclose(out, expected, rtol=0.15, atol=tolerance.absolute * largest)
    different = (out != expected)[np.isfinite(expected)]
    assert different.sum() <= max(64, 0.01 * different.size)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("row_format", RowFormat, ids=lambda kind: kind.value)
@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_latent_rows(case: latent_cases.Case, row_format: RowFormat, dtype: Any) -> None:
    tolerance = FLOAT32_GPU if dtype == jnp.float32 else BFLOAT16_OP
    like = empty_rows((), case.width, row_format, num_rotary=case.rotary, dtype=dtype)
    arguments = latent_cases.make(case, fresh_seed(), dtype)
    out, expected = both(finish_rows, arguments | {"like": like}, by_operation=True)
    np.testing.assert_array_equal(as_stored(out, like), out)
    check_latent(out, expected, row_format is not RowFormat.PLAIN, tolerance)
    for is_keys in (False, True):
        arguments = latent_cases.make_stored(
            case, fresh_seed(), dtype, row_format, is_keys=is_keys, pages=700
        )
        out, expected = both(store_rows, arguments, by_operation=True)
        is_rounded = not isinstance(out, jax.Array)
        check_latent(decode(out), decode(expected), is_rounded, tolerance)
