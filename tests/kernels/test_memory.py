"""On a GPU: loaded layers of Flash's geometry take the memory that their files take."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.kernels.quantized import Fp4Weight, Fp8Weight
from dspark_jax.model.params import param_specs
from tests.kernels.flash import FLASH, abstract_tree, released
from tests.seeds import fresh_seed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_loaded_layers_take_their_stored_size(tmp_path: Path) -> None:
    """One layer of each compressed kind: about 7 GB, nearly all of it experts."""
    raw = {k: v for k, v in FLASH.items() if not k.startswith("dspark_")}
    raw |= {"num_hidden_layers": 2, "compress_ratios": [4, 128, 0], "vocab_size": 4096}
    cfg = released(raw, num_hash_layers=1)
    rng = np.random.default_rng(fresh_seed())

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if leaf.dtype in (jnp.uint8, jnp.float8_e4m3fn) or leaf.size > 1 << 26:
            # Any byte is an fp4 pair; of fp8 codes and scales these are numbers.
            filled = rng.integers(0, 120, leaf.size * leaf.dtype.itemsize, np.uint8)
            return filled.view(leaf.dtype).reshape(leaf.shape)
        return rng.integers(0, 120, leaf.shape).astype(leaf.dtype)

    export_checkpoint(tmp_path, cfg, jax.tree.map(draw, abstract_tree(param_specs(cfg), cfg)), None)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    gc.collect()
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    _, params, _ = load_checkpoint(tmp_path, dtype=jnp.bfloat16, keep_quantized=True)
    jax.block_until_ready(params)
    taken = device.memory_stats()["bytes_in_use"] - before
    print(f"stored {stored / 1e9:.3f} GB, on the GPU {taken / 1e9:.3f} GB")
    assert isinstance(params.blocks.w_gate_up, Fp4Weight)
    assert isinstance(params.blocks.w_o_a, Fp8Weight)
    assert abs(taken - stored) < 0.05 * stored
