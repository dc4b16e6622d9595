"""Eight devices admit the same drafts: from the same confidences, and from the leader's where their own differ."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.decode.allocate import allocate
from dspark_jax.model.batch import layout

DEVICES = 8
TOKENS = 24
CAPS = np.array([7, 7, 3, 0, 7], np.int32)
BUDGET = np.int32(11)


def layouts(confidences: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Admitted drafts [R] and the flat rows [T] that follow from them."""
    verify_lens = allocate(confidences, CAPS, BUDGET)
    batch, _ = layout(TOKENS, jnp.arange(5), jnp.full(5, 30), 1 + verify_lens)
    return verify_lens, batch.seq_ids


def from_leader(confidences: jax.Array) -> jax.Array:
    """Every device's copy of what device 0 holds."""
    is_leader = jax.lax.axis_index("device") == 0
    return jax.lax.psum(jnp.where(is_leader, confidences, 0), "device")


def on_every_device(mesh: Mesh, function, confidences: np.ndarray) -> list[list[np.ndarray]]:
    """`function` of each device's own `confidences` [devices, R, G]: results by device."""
    spec = PartitionSpec("device")
    placed = jax.device_put(confidences, NamedSharding(mesh, spec))

    def body(own: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(leaf[None] for leaf in function(own[0]))

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    results = [np.asarray(leaf) for leaf in mapped(placed)]
    return [[leaf[i] for leaf in results] for i in range(DEVICES)]


def all_equal(results: list[list[np.ndarray]]) -> bool:
    return all(
        np.array_equal(a, b) for result in results for a, b in zip(result, results[0], strict=True)
    )


def check() -> None:
    """Run in a process of eight CPU devices."""
    assert jax.device_count() == DEVICES
    mesh = Mesh(jax.devices(), ("device",))
    rng = np.random.default_rng(0)

    # One program over replicated inputs: each device computes its copy.
    confidences = rng.choice(np.array([1.0, 0.9, 0.5], np.float32), (5, 7))
    replicated = jax.device_put(confidences, NamedSharding(mesh, PartitionSpec()))
    for leaf in jax.jit(layouts)(replicated):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == DEVICES
        assert all_equal([[copy] for copy in copies])

    # At the edge of the budget two slots tie: the slightest difference between devices moves the edge.
    edge = np.full((5, 7), 0.1, np.float32)
    edge[0] = 1.0
    edge[1, :3] = edge[4, :2] = 1.0
    edge[1, 3] = edge[4, 2] = 0.5
    own = np.tile(edge, (DEVICES, 1, 1))
    own[::2, 1, 3], own[1::2, 1, 3] = 0.499999, 0.500001
    own[3, 4, 1] = 0.499999
    assert not all_equal(on_every_device(mesh, layouts, own))
    led = on_every_device(mesh, lambda c: layouts(from_leader(c)), own)
    assert all_equal(led)
    assert led[3][0].tolist() == np.asarray(allocate(own[0], CAPS, BUDGET)).tolist()


def test_devices_agree():
    """Case of rank-local confidences on both sides of a decision: all devices follow the leader."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    result = subprocess.run(
        [sys.executable, "-m", "tests.decode.test_agreement"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    check()
