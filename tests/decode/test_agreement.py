"""Devices of a mesh admit the same drafts: from equal confidences, and from the leader's where theirs differ."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.decode.allocate import allocate
from dspark_jax.model.batch import layout

DEVICES = 8
TOKENS = 24
CAPS = np.array([7, 7, 3, 0, 7], np.int32)
BUDGET = np.int32(11)
# Both sides of a decision; survivals of the other contestants are 0.5 exactly.
BELOW, ABOVE = np.float32(0.499999), np.float32(0.500001)


def layouts(confidences: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Admitted drafts [R] and the flat rows [T] that follow from them."""
    verify_lens = allocate(confidences, CAPS, BUDGET)
    batch, _ = layout(TOKENS, jnp.arange(5), jnp.full(5, 30), 1 + verify_lens)
    return verify_lens, batch.seq_ids


def from_leader(value: jax.Array) -> jax.Array:
    """Every device's copy of what device 0 holds."""
    is_leader = jax.lax.axis_index("device") == 0
    return jax.lax.psum(jnp.where(is_leader, value, 0), "device")


def on_every_device(mesh: Mesh, function, *values: np.ndarray) -> list[list[np.ndarray]]:
    """`function` of each device's own part of `values` [devices, ...]: results by device."""
    spec = PartitionSpec("device")
    placed = [jax.device_put(value, NamedSharding(mesh, spec)) for value in values]

    def body(*own: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(leaf[None] for leaf in function(*(value[0] for value in own)))

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    results = [np.asarray(leaf) for leaf in mapped(*placed)]
    return [[leaf[i] for leaf in results] for i in range(mesh.size)]


def all_equal(results: list[list[np.ndarray]]) -> bool:
    return all(
        np.array_equal(a, b) for result in results for a, b in zip(result, results[0], strict=True)
    )


def check_case_27(count: int) -> None:
    """Equal confidences, all 1.0 included: no holes, the same on every device and whenever it runs again."""
    mesh = Mesh(jax.devices()[:count], ("device",))
    program = jax.jit(layouts)
    for value in (1.0, 0.5, 0.0):
        confidences = np.full((5, 7), value, np.float32)
        replicated = jax.device_put(confidences, NamedSharding(mesh, PartitionSpec()))
        runs = [program(replicated) for _ in range(3)]
        copies = [
            [np.asarray(leaf.addressable_shards[i].data) for leaf in run]
            for run in runs
            for i in range(count)
        ]
        assert len(copies) == 3 * count
        assert all_equal(copies)
        # Position by position, rows in order; the third row has three drafts, the fourth none.
        if value == 1.0:
            assert copies[0][0].tolist() == [3, 3, 3, 0, 2]
        assert copies[0][0].sum() == BUDGET


def check_case_38(count: int) -> None:
    """At the edge of the budget a hair decides: devices on their own part ways, led ones do not."""
    mesh = Mesh(jax.devices()[:count], ("device",))
    edge = np.full((5, 7), 0.1, np.float32)
    edge[0] = 1.0
    edge[1, :3] = 1.0
    edge[1, 3] = edge[4, 0] = 0.5
    own = np.tile(edge, (count, 1, 1))
    # Eleven slots: ten sure ones, and one of two that are even but for rounding.
    own[::2, 4, 0], own[1::2, 4, 0] = BELOW, ABOVE
    expected = {BELOW: [7, 4, 0, 0, 0], ABOVE: [7, 3, 0, 0, 1]}
    alone = on_every_device(mesh, layouts, own)
    for device, (lens, _) in enumerate(alone):
        assert lens.tolist() == expected[own[device, 4, 0]]
    assert all_equal(alone) == (count == 1)
    led = on_every_device(mesh, lambda c: layouts(from_leader(c)), own)
    assert all_equal(led)
    assert led[-1][0].tolist() == expected[BELOW]


def check_case_39(count: int) -> None:
    """An idle device, one that decodes and one with a prompt alone run one program of one shape, and end.

    The program holds a collective, which a device in another program would wait for in vain.
    """
    mesh = Mesh(jax.devices()[:count], ("device",))
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.1, 1.0, (count, 5, 7)).astype(np.float32)
    kinds = np.arange(count) % 3  # idle, busy, prompt
    query_lens = np.array([[0] * 5, [1] * 5, [0, 12, 0, 0, 0]], np.int32)[kinds]
    caps = np.where((kinds == 1)[:, None], CAPS, 0).astype(np.int32)
    budgets = np.where(kinds == 1, BUDGET, 0).astype(np.int32)

    def step(confidences, caps, budget, query_lens):
        lens = allocate(confidences, caps, budget)
        batch, _ = layout(TOKENS, jnp.arange(5), jnp.full(5, 30), query_lens + lens)
        return lens, batch.seq_ids, jax.lax.psum(batch.is_token.sum(), "device")

    results = on_every_device(mesh, step, confidences, caps, budgets, query_lens)
    for device, (lens, rows, total) in enumerate(results):
        alone = allocate(confidences[device], caps[device], budgets[device])
        assert lens.tolist() == np.asarray(alone).tolist()
        assert (rows >= 0).sum() == query_lens[device].sum() + budgets[device]
        assert total == query_lens.sum() + budgets.sum()


CHECKS = {"27": check_case_27, "38": check_case_38, "39": check_case_39}


@pytest.mark.parametrize("case", CHECKS)
def test_case_on_1_2_4_and_8_devices(case):
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    result = subprocess.run(
        [sys.executable, "-m", "tests.decode.test_agreement", case],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "2", "4", "8"]


if __name__ == "__main__":
    assert jax.device_count() == DEVICES
    for device_count in (1, 2, 4, 8):
        CHECKS[sys.argv[1]](device_count)
        print(device_count)
