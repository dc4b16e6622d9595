"""The shape of the bundled model."""

from __future__ import annotations

from dspark_jax.config import AttentionKind, DraftConfig, ModelConfig

VOCAB_SIZE = 1024


def bundled_config(
    vocab_size: int = VOCAB_SIZE, *, num_stages: int = 3, markov_rank: int = 128
) -> ModelConfig:
    """Every mechanism of DeepSeek-V4-Flash and its drafter, small enough to ship.

    The drafter's noise token is the last id, where `training.tokenizer` puts it.
    """
    sliding, csa, hca = AttentionKind.SLIDING, AttentionKind.CSA, AttentionKind.HCA
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=64,
        attention_kinds=(sliding, sliding, *(csa, hca) * 5),
        csa_ratio=4,
        hca_ratio=32,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        max_position_embeddings=4096,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        num_hash_layers=1,
        draft=DraftConfig(
            block_size=7,
            noise_token_id=vocab_size - 1,
            target_layer_ids=(9, 10, 11),
            markov_rank=markov_rank,
            num_stages=num_stages,
        ),
    )
