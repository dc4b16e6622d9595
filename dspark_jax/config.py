"""Configurations of the target model and its drafter, and how `config.json` is read.

Both spellings are understood: the released one (`compress_ratios`, `num_hash_layers`, `rope_theta`) and
Hugging Face's (`layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters`). Fields keep their
released names wherever one exists.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class ConfigError(ValueError):
    """A configuration that this package cannot run; the message names the field and the remedy."""


class AttentionKind(enum.Enum):
    """What a layer attends to besides its sliding window."""

    SLIDING = "sliding"  # nothing
    CSA = "csa"  # the indexer's choice among overlapping compressed entries
    HCA = "hca"  # every non-overlapping compressed entry


class RouterKind(enum.Enum):
    """How a layer chooses its experts."""

    HASH = "hash"  # table indexed by the token id
    SCORE = "score"  # top-k of score + bias


class LayerKind(NamedTuple):
    """Everything about a layer that is fixed when its program is traced."""

    attention: AttentionKind
    router: RouterKind


class Segment(NamedTuple):
    """`count` repetitions of `pattern`, a run of layers that one `scan` executes."""

    pattern: tuple[LayerKind, ...]
    count: int


class AttentionSegment(NamedTuple):
    """A `Segment` by attention kind alone."""

    pattern: tuple[AttentionKind, ...]
    count: int


_HF_LAYER_TYPES = {
    "sliding_attention": AttentionKind.SLIDING,
    "compressed_sparse_attention": AttentionKind.CSA,
    "heavily_compressed_attention": AttentionKind.HCA,
}
_RELEASED_CSA_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN frequency scaling of the compressed layers' rotary table."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """DSpark drafter of the released layout (`mtp.*` tensors).

    `block_size` is the number of drafted tokens per round; `target_layer_ids` are the target layers whose
    outputs, averaged over streams, feed the drafter's context.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    num_stages: int = 3

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"dspark_block_size must be at least 1, got {self.block_size}")
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            raise ConfigError(f"dspark_target_layer_ids must be increasing, got {list(ids)}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """DeepSeek-V4 text model. Units are elements; names follow the released `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    attention_kinds: tuple[AttentionKind, ...]
    csa_ratio: int = _RELEASED_CSA_RATIO
    hca_ratio: int = 128
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnConfig | None = field(default_factory=YarnConfig)
    max_position_embeddings: int
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int = 3
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1
    expert_dtype: str = "fp4"
    draft: DraftConfig | None = None

    def __post_init__(self) -> None:
        if len(self.attention_kinds) != self.num_hidden_layers:
            raise ConfigError(
                f"{len(self.attention_kinds)} attention kinds for {self.num_hidden_layers} layers"
            )
        if self.num_attention_heads * self.head_dim % self.o_groups:
            raise ConfigError(
                f"o_groups {self.o_groups} does not divide heads x head_dim "
                f"{self.num_attention_heads * self.head_dim}"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(
            self.head_dim, self.index_head_dim
        ):
            raise ConfigError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} must be even and fit the head widths"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds "
                f"n_routed_experts {self.n_routed_experts}"
            )
        if self.draft is not None and self.draft.target_layer_ids[-1] >= self.num_hidden_layers:
            raise ConfigError(
                f"dspark_target_layer_ids {list(self.draft.target_layer_ids)} must lie below "
                f"num_hidden_layers {self.num_hidden_layers}"
            )

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Kind of every layer, in order."""
        return tuple(
            LayerKind(kind, RouterKind.HASH if i < self.num_hash_layers else RouterKind.SCORE)
            for i, kind in enumerate(self.attention_kinds)
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers as few scans: single layers, then repeating patterns of one or two layers."""
        return _segments(self.layers)

    @property
    def attention_segments(self) -> tuple[AttentionSegment, ...]:
        """As `segments`, for a program that tells the routers apart at run time: fewer, longer scans."""
        return tuple(
            AttentionSegment(tuple(kind.attention for kind in pattern), count)
            for pattern, count in _segments(
                [LayerKind(kind, RouterKind.SCORE) for kind in self.attention_kinds]
            )
        )

    def indices_of(self, kind: AttentionKind) -> tuple[int, ...]:
        """Layer numbers of one attention kind, increasing."""
        return tuple(i for i, k in enumerate(self.attention_kinds) if k is kind)


def _segments(layers: Sequence[LayerKind]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    rest = tuple(layers)
    while rest:
        runs = [(_repeats(rest, width), width) for width in (1, 2)]
        count, width = max(runs, key=lambda run: run[0] * run[1] if run[0] > 1 else 0)
        if count == 1:
            width = 1
        segments.append(Segment(rest[:width], count))
        rest = rest[width * count :]
    return tuple(segments)


def _repeats(layers: tuple[LayerKind, ...], width: int) -> int:
    """How often the first `width` layers repeat from the start of `layers`."""
    pattern, count = layers[:width], 1
    while layers[count * width : (count + 1) * width] == pattern:
        count += 1
    return count


def load_config(folder: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read `config.json` of a checkpoint folder, its top-level keys replaced by those of `overrides`.

    Raises `ConfigError` when the file is missing, is not JSON, or describes another architecture.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"no config.json in {folder}; --model takes a checkpoint folder"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return config_from_dict({**raw, **(overrides or {})})


def config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """Build a `ModelConfig` from a parsed `config.json` in released or Hugging Face naming."""
    model_type = raw.get("model_type", "deepseek_v4")
    if model_type != "deepseek_v4":
        raise ConfigError(f"model_type {model_type!r} is not supported; only 'deepseek_v4' is")
    scoring = raw.get("scoring_func", "sqrtsoftplus")
    if scoring != "sqrtsoftplus":
        raise ConfigError(f"scoring_func {scoring!r} is not supported; only 'sqrtsoftplus' is")
    if raw.get("n_shared_experts", 1) != 1:
        raise ConfigError(f"n_shared_experts must be 1, got {raw['n_shared_experts']}")
    try:
        return _parse(raw)
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}") from error


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    num_layers = raw["num_hidden_layers"]
    kinds, csa_ratio, hca_ratio = _attention_kinds(raw, num_layers)
    rope_theta, compress_theta, yarn = _rope(raw)
    same = (
        "vocab_size hidden_size num_attention_heads head_dim q_lora_rank o_groups o_lora_rank "
        "sliding_window index_n_heads index_head_dim index_topk max_position_embeddings "
        "n_routed_experts num_experts_per_tok moe_intermediate_size"
    ).split()
    optional = (
        "hc_mult hc_sinkhorn_iters hc_eps routed_scaling_factor swiglu_limit rms_norm_eps "
        "bos_token_id eos_token_id expert_dtype"
    ).split()
    rope_dim = raw.get("qk_rope_head_dim")
    if rope_dim is None:
        rope_dim = round(raw["partial_rotary_factor"] * raw["head_dim"])
    return ModelConfig(
        **{name: raw[name] for name in same},
        **{name: raw[name] for name in optional if raw.get(name) is not None},
        num_hidden_layers=num_layers,
        qk_rope_head_dim=rope_dim,
        attention_kinds=kinds,
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        rope_theta=rope_theta,
        compress_rope_theta=compress_theta,
        yarn=yarn,
        num_hash_layers=_num_hash_layers(raw),
        draft=_draft(raw),
    )


def _attention_kinds(
    raw: Mapping[str, Any], num_layers: int
) -> tuple[tuple[AttentionKind, ...], int, int]:
    if "layer_types" in raw:
        unknown = set(raw["layer_types"]) - set(_HF_LAYER_TYPES)
        if unknown:
            raise ConfigError(f"layer_types has unknown entries {sorted(unknown)}")
        rates = raw.get("compress_rates", {})
        return (
            tuple(_HF_LAYER_TYPES[name] for name in raw["layer_types"]),
            rates.get("compressed_sparse_attention", _RELEASED_CSA_RATIO),
            rates.get("heavily_compressed_attention", 128),
        )
    # Released files append zeros for the draft stages: only the first num_layers describe the target.
    ratios = raw["compress_ratios"][:num_layers]
    csa_ratio = raw.get("csa_compress_ratio", _RELEASED_CSA_RATIO)
    heavy = sorted({r for r in ratios if r not in (0, csa_ratio)})
    if len(heavy) > 1:
        raise ConfigError(f"compress_ratios mixes several heavy ratios {heavy}; one is supported")
    kinds = {0: AttentionKind.SLIDING, csa_ratio: AttentionKind.CSA}
    return (
        tuple(kinds.get(r, AttentionKind.HCA) for r in ratios),
        csa_ratio,
        heavy[0] if heavy else 128,
    )


def _num_hash_layers(raw: Mapping[str, Any]) -> int:
    if "mlp_layer_types" not in raw:
        return raw.get("num_hash_layers", 3)
    types = raw["mlp_layer_types"]
    count = types.count("hash_moe")
    if types[:count] != ["hash_moe"] * count:
        raise ConfigError("mlp_layer_types must put every hash_moe layer first")
    return count


def _rope(raw: Mapping[str, Any]) -> tuple[float, float, YarnConfig | None]:
    parameters = raw.get("rope_parameters") or {}
    if "compress" in parameters:
        scaling = parameters["compress"]
        main_theta = parameters.get("main", {}).get("rope_theta", 10000.0)
        compress_theta = scaling.get("rope_theta", 160000.0)
    else:
        scaling = raw.get("rope_scaling") or parameters or None
        main_theta = raw.get("rope_theta", 10000.0)
        compress_theta = raw.get("compress_rope_theta", 160000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    if scaling is None or kind == "default":
        return main_theta, compress_theta, None
    if kind != "yarn":
        raise ConfigError(f"rope scaling {kind!r} is not supported; only 'yarn' is")
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    return main_theta, compress_theta, YarnConfig(**{n: scaling[n] for n in names if n in scaling})


def _draft(raw: Mapping[str, Any]) -> DraftConfig | None:
    if "dspark_block_size" not in raw:
        return None
    return DraftConfig(
        block_size=raw["dspark_block_size"],
        noise_token_id=raw["dspark_noise_token_id"],
        target_layer_ids=tuple(raw["dspark_target_layer_ids"]),
        markov_rank=raw["dspark_markov_rank"],
        num_stages=raw.get("dspark_num_stages", 3),
    )
