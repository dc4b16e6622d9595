"""Reading released configuration files."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.torch_ref.configs import tiny_config, tiny_dspark_config
from torch_ref.config import CSA, HCA, SLIDING, TorchRefConfig, YarnScaling
from torch_ref.layers import inverse_frequencies
from torch_ref.random_weights import tensor_shapes

FLASH = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FLASH_DSPARK = FLASH | {
    "compress_ratios": FLASH["compress_ratios"] + [0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


def test_flash_layers():
    cfg = TorchRefConfig.from_dict(FLASH)
    kinds = [cfg.layer_type(layer) for layer in range(cfg.num_hidden_layers)]
    assert Counter(kinds) == {SLIDING: 2, CSA: 21, HCA: 20}
    assert kinds[:4] == [SLIDING, SLIDING, CSA, HCA]
    assert kinds[-1] == CSA
    assert cfg.rope_scaling == YarnScaling(factor=16, original_max_position_embeddings=65536)
    assert cfg.dspark_num_stages == 0


def test_flash_tensor_inventory():
    """The published index lists 69187 tensors, scales and the 1575 of one MTP block included."""
    cfg = TorchRefConfig.from_dict(FLASH)
    shapes = dict(tensor_shapes(cfg))
    experts_per_layer, attention_linears, indexer_linears = 3 * 256 + 3, 5, 1
    scales = 43 * (experts_per_layer + attention_linears) + 21 * indexer_linears
    assert len(shapes) + scales + 1575 == 69187
    assert shapes["layers.2.attn.wq_b.weight"] == (32768, 1024)
    assert shapes["layers.2.attn.wo_a.weight"] == (8192, 4096)
    assert shapes["layers.2.attn.indexer.wq_b.weight"] == (8192, 1024)
    assert shapes["layers.3.attn.compressor.ape"] == (128, 512)
    assert shapes["layers.2.ffn.gate.tid2eid"] == (129280, 6)
    assert "layers.2.ffn.gate.bias" not in shapes


def test_flash_dspark_tensor_inventory():
    """The released drafter has 4705 tensors, scales included."""
    cfg = TorchRefConfig.from_dict(FLASH_DSPARK, num_stages=3)
    shapes = {name: shape for name, shape in tensor_shapes(cfg) if name.startswith("mtp.")}
    scales = 3 * (3 * 256 + 3 + 5) + 1
    assert len(shapes) + scales == 4705
    assert shapes["mtp.0.main_proj.weight"] == (4096, 12288)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, 4352)


def test_yarn_frequencies_of_the_released_models():
    cfg = TorchRefConfig.from_dict(FLASH)
    plain = inverse_frequencies(TorchRefConfig.from_dict(FLASH | {"rope_scaling": None}), True)
    ratios = (plain / inverse_frequencies(cfg, compressed=True)).tolist()
    assert ratios[:16] == pytest.approx([1.0] * 16)
    assert ratios[16:25] == pytest.approx(
        [1.1034, 1.2308, 1.3913, 1.6, 1.8824, 2.2857, 2.9091, 4, 6.4], abs=1e-4
    )
    assert ratios[25:] == pytest.approx([16.0] * 7)
    assert inverse_frequencies(cfg, compressed=False)[1].item() == pytest.approx(10000 ** (-1 / 32))


@pytest.mark.parametrize(
    "cfg",
    [
        tiny_config(),
        tiny_config(rope_scaling=None),
        tiny_config(compress_ratios=(2, 16), csa_compress_ratio=2),
        tiny_dspark_config(),
    ],
)
def test_released_naming_round_trip(cfg):
    released = cfg.to_released()
    assert TorchRefConfig.from_dict(released) == cfg
    assert len(released["compress_ratios"]) == cfg.num_hidden_layers + cfg.dspark_num_stages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ({"compress_ratios": [4]}, "1 entries"),
        ({"o_groups": 3}, "o_groups=3"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"num_experts_per_tok": 1000}, "1000"),
        ({"dspark_target_layer_ids": [43]}, "out of range"),
    ],
)
def test_what_the_architecture_lacks_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TorchRefConfig.from_dict(FLASH_DSPARK | change, num_stages=3)
