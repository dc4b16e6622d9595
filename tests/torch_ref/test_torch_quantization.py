"""Number formats, and reading checkpoint folders that use them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tests.parity.compare import EXACT, assert_close
from tests.seeds import fresh_seed
from tests.torch_ref.configs import tiny_config, tiny_dspark_config
from torch_ref.checkpoint import load_checkpoint, load_tensors, save_checkpoint
from torch_ref.model import forward
from torch_ref.quantization import (
    E2M1_VALUES,
    Simulation,
    hadamard,
    power_of_two_scale,
    round_e2m1,
    round_e4m3,
)
from torch_ref.random_weights import random_weights


def test_scale_is_the_smallest_sufficient_power_of_two():
    amax = torch.tensor([448.0, 448.1, 447.9, 224.0, 1e-9, 1.0])
    expected = torch.tensor([1.0, 2.0, 1.0, 0.5, 2.0**-22, 2.0**-8])
    assert torch.equal(power_of_two_scale(amax, 1e-4, 448.0), expected)


def test_e2m1_rounds_to_the_nearest_and_halves_to_even():
    grid = torch.tensor(E2M1_VALUES)
    x = torch.linspace(-6, 6, 4097)
    x[0] = 6.0  # pins the scale of the block to 1
    rounded = round_e2m1(x, len(x))
    distance = (x.abs()[:, None] - grid).abs()
    assert torch.equal((x - rounded).abs(), distance.amin(-1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 6.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -2.0, 6.0])
    assert torch.equal(round_e2m1(ties, 10), expected)


def test_each_block_has_its_own_scale():
    x = torch.cat([torch.full((64,), 300.0), torch.full((20,), 3.0e-3)])
    x[0], x[64] = 0.37, 2.9e-6
    rounded = round_e4m3(x, 64)
    assert rounded[0] == 0.375
    assert rounded[64] == pytest.approx(2.9e-6, rel=0.07)
    assert rounded[65:] == pytest.approx(x[65:], rel=0.07)


def test_hadamard_is_orthonormal_and_flat():
    rotation = hadamard(16)
    assert_close(rotation @ rotation.T, torch.eye(16), EXACT)
    assert len(rotation.abs().unique()) == 1
    with pytest.raises(ValueError, match="24"):
        hadamard(24)


def test_each_rounding_changes_the_logits_a_little():
    cfg = tiny_config(index_topk=100)
    weights = random_weights(cfg, 0)
    token_ids = torch.arange(50)[None]
    exact = forward(weights, cfg, token_ids)
    assert torch.equal(forward(weights, cfg, token_ids, simulate_quantization=Simulation()), exact)
    for name in ("linear_activations", "cache_rows", "probabilities"):
        rounded = forward(weights, cfg, token_ids, simulate_quantization=Simulation(**{name: True}))
        assert 1e-5 < (rounded - exact).abs().median() < 0.2, name
    picks = tiny_config(index_topk=2)
    moved = forward(weights, picks, token_ids) - forward(
        weights, picks, token_ids, simulate_quantization=Simulation(index_rows=True)
    )
    assert moved.abs().max() > 1e-3


def _encode_fp8(weight):
    """Blockwise e4m3 of a matrix, written value by value: codes and ue8m0 scales."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
            scale[i, j] = 2.0 ** torch.ceil(torch.log2(weight[block].abs().max() / 448))
            codes[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu)


def test_quantised_folder(tmp_path):
    generator = torch.Generator().manual_seed(fresh_seed())
    weight = torch.randn(200, 300, generator=generator) * torch.logspace(-3, 3, 300)
    codes, scale = _encode_fp8(weight)
    # Two fp4 rows of 64 columns: byte b holds column 2b in its low nibble, 2b + 1 in its high.
    nibbles = torch.arange(128).reshape(2, 64) % 16
    packed = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
    fp4_scale = torch.tensor([[1.0, 4.0], [0.5, 2.0]])
    save_file(
        {
            "a.weight": codes,
            "a.scale": scale,
            "b.weight": packed,
            "b.scale": fp4_scale.to(torch.float8_e8m0fnu),
        },
        tmp_path / "model-00001-of-00002.safetensors",
    )
    save_file(
        {"c.weight": weight.bfloat16(), "gate.bias": weight[0], "tid2eid": torch.arange(4)},
        tmp_path / "model-00002-of-00002.safetensors",
    )
    loaded = load_tensors(tmp_path)
    assert loaded.keys() == {"a.weight", "b.weight", "c.weight", "gate.bias", "tid2eid"}
    for i in range(0, 200, 7):
        for j in range(0, 300, 7):
            expected = codes[i, j].float() * scale[i // 128, j // 128].float()
            assert loaded["a.weight"][i, j] == expected
    signed = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    expected = [
        [signed[nibbles[i, j]] * float(fp4_scale[i, j // 32]) for j in range(64)] for i in range(2)
    ]
    assert loaded["b.weight"].tolist() == expected
    assert torch.equal(loaded["c.weight"], weight.bfloat16().float())
    assert loaded["gate.bias"].dtype == torch.float32
    assert loaded["tid2eid"].dtype == torch.int64


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "a.weight .* no scale"),
        ({"a.weight": torch.zeros(4, 4), "a.scale": torch.ones(1, 1)}, "a.weight .* has a scale"),
        ({"a.scale": torch.ones(1, 1)}, r"without a matrix: \['a'\]"),
        (
            {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a.scale": torch.ones(2, 1)},
            r"scale \(2, 1\)",
        ),
    ],
)
def test_contradictory_folder_is_refused(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_tensors(tmp_path)


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        load_tensors(tmp_path)


def test_plain_folder_round_trip(tmp_path):
    cfg = tiny_dspark_config()
    weights = random_weights(cfg, 3)
    # A tied and a transposed tensor: views that a file cannot hold as they are.
    weights["head.weight"] = weights["embed.weight"]
    weights["mtp.2.hc_head_fn"] = weights["mtp.2.hc_head_fn"].T.contiguous().T
    released = cfg.to_released()
    del released["dspark_num_stages"]
    save_checkpoint(tmp_path, weights, released)
    read, loaded = load_checkpoint(tmp_path)
    assert read == cfg
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), name
