"""The one table between the tensors of a checkpoint and the leaves of the parameter trees.

`_BLOCK`, `_TARGET` and `_DRAFT` say which tensors make up one leaf of one layer. Everything else (stack
index, rows, shape, storage, the number of tensors) follows from the tree's `Spec`s, so a leaf that the table
forgets cannot be built.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.config import AttentionKind, ModelConfig, RouterKind
from dspark_jax.draft.params import draft_specs
from dspark_jax.model.params import Spec, block_specs, param_specs


class Naming(enum.Enum):
    """Whose tensor names a file uses."""

    RELEASED = "released"
    HUGGING_FACE = "Hugging Face state_dict"
    HUGGING_FACE_SAVED = "Hugging Face save_pretrained"  # released names, a few of them changed


class Entry(NamedTuple):
    """One weight tensor of a file and the part of a leaf that it fills.

    `leaf[index]` is what one tensor, or several stacked by rows, hold; this one holds its `rows` (all of them
    for `slice(None)`). `shape` is the tensor's shape unless the file packs it.
    """

    name: str
    path: tuple[str, ...]
    index: tuple[int, ...]
    rows: slice
    shape: tuple[int, ...]
    storage: str  # as `Spec.storage`
    optional: bool = False

    @property
    def scale_name(self) -> str:
        """Name of the scales beside a quantised tensor."""
        return self.name.removesuffix("weight") + "scale"

    @property
    def is_quantizable(self) -> bool:
        """Whether a file may keep this tensor as fp8 or fp4."""
        return self.storage in ("fp8", "expert") and self.name.endswith(".weight")


class _Row(NamedTuple):
    """Tensors of one leaf: several names are stacked by rows, in this order."""

    released: tuple[str, ...]
    hugging_face: tuple[str, ...]


def _row(released: str, hugging_face: str = "") -> _Row:
    return _Row(tuple(released.split()), tuple(hugging_face.split()))


# Per layer, without the layer's prefix. {e} is the expert.
_BLOCK: Mapping[str, _Row] = {
    "g_attn": _row("attn_norm.weight", "input_layernorm.weight"),
    "g_ffn": _row("ffn_norm.weight", "post_attention_layernorm.weight"),
    "hyper_attn.w_fn": _row("hc_attn_fn", "attn_hc.fn"),
    "hyper_attn.base": _row("hc_attn_base", "attn_hc.base"),
    "hyper_attn.scale": _row("hc_attn_scale", "attn_hc.scale"),
    "hyper_ffn.w_fn": _row("hc_ffn_fn", "ffn_hc.fn"),
    "hyper_ffn.base": _row("hc_ffn_base", "ffn_hc.base"),
    "hyper_ffn.scale": _row("hc_ffn_scale", "ffn_hc.scale"),
    "w_q_a": _row("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
    "g_q": _row("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    "w_q_b": _row("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
    "w_kv": _row("attn.wkv.weight", "self_attn.kv_proj.weight"),
    "g_kv": _row("attn.kv_norm.weight", "self_attn.kv_norm.weight"),
    "attn_sink": _row("attn.attn_sink", "self_attn.sinks"),
    "w_o_a": _row("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    "w_o_b": _row("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
    "w_router": _row("ffn.gate.weight", "mlp.gate.weight"),
    "b_router": _row("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "w_gate_up": _row(
        "ffn.experts.{e}.w1.weight ffn.experts.{e}.w3.weight", "mlp.experts.gate_up_proj"
    ),
    "w_down": _row("ffn.experts.{e}.w2.weight", "mlp.experts.down_proj"),
    "w_shared_gate_up": _row(
        "ffn.shared_experts.w1.weight ffn.shared_experts.w3.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
    ),
    "w_shared_down": _row("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
}
_COMPRESSOR: Mapping[str, _Row] = {
    "w_kv_gate": _row(
        "attn.compressor.wkv.weight attn.compressor.wgate.weight",
        "self_attn.compressor.kv_proj.weight self_attn.compressor.gate_proj.weight",
    ),
    "ape": _row("attn.compressor.ape", "self_attn.compressor.position_bias"),
    "g_norm": _row("attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"),
}
_HF_INDEXER = "self_attn.compressor.indexer"
_INDEXER: Mapping[str, _Row] = {
    "w_q_b": _row("attn.indexer.wq_b.weight", f"{_HF_INDEXER}.q_b_proj.weight"),
    "w_heads": _row(
        "attn.indexer.weights_proj.weight", f"{_HF_INDEXER}.scorer.weights_proj.weight"
    ),
    "compressor.w_kv_gate": _row(
        "attn.indexer.compressor.wkv.weight attn.indexer.compressor.wgate.weight",
        f"{_HF_INDEXER}.kv_proj.weight {_HF_INDEXER}.gate_proj.weight",
    ),
    "compressor.ape": _row("attn.indexer.compressor.ape", f"{_HF_INDEXER}.position_bias"),
    "compressor.g_norm": _row(
        "attn.indexer.compressor.norm.weight", f"{_HF_INDEXER}.kv_norm.weight"
    ),
}
_HYPER_HEAD: Mapping[str, _Row] = {
    "hyper_head.w_fn": _row("hc_head_fn", "model.hc_head.hc_fn"),
    "hyper_head.base": _row("hc_head_base", "model.hc_head.hc_base"),
    "hyper_head.scale": _row("hc_head_scale", "model.hc_head.hc_scale"),
}


def _nested(prefix: str, rows: Mapping[str, _Row], released: str, hf: str = "") -> dict[str, _Row]:
    return {
        prefix + leaf: _Row(
            tuple(released + name for name in row.released),
            tuple(hf + name for name in row.hugging_face),
        )
        for leaf, row in rows.items()
    }


# Whole names. {i} is the layer or stage, {last} the last stage.
_TARGET: Mapping[str, _Row] = {
    "embed": _row("embed.weight", "model.embed_tokens.weight"),
    "head": _row("head.weight", "lm_head.weight"),
    "g_norm": _row("norm.weight", "model.norm.weight"),
    **_HYPER_HEAD,
    **_nested("blocks.", _BLOCK, "layers.{i}.", "model.layers.{i}."),
    **_nested("csa.", _COMPRESSOR, "layers.{i}.", "model.layers.{i}."),
    **_nested("indexer.", _INDEXER, "layers.{i}.", "model.layers.{i}."),
    **_nested("hca.", _COMPRESSOR, "layers.{i}.", "model.layers.{i}."),
    "tid2eid": _row("layers.{i}.ffn.gate.tid2eid", "model.layers.{i}.mlp.gate.tid2eid"),
}
_DRAFT: Mapping[str, _Row] = {
    "w_main": _row("mtp.0.main_proj.weight"),
    "g_main": _row("mtp.0.main_norm.weight"),
    **_nested("stages.", _BLOCK, "mtp.{i}."),
    "g_norm": _row("mtp.{last}.norm.weight"),
    **_nested("", _HYPER_HEAD, "mtp.{last}."),
    "markov_w1": _row("mtp.{last}.markov_head.markov_w1.weight"),
    "markov_w2": _row("mtp.{last}.markov_head.markov_w2.weight"),
    "w_confidence": _row("mtp.{last}.confidence_head.proj.weight"),
    "calibration_scale": _row("mtp.{last}.confidence_head.calibration_scale"),
    "calibration_offset": _row("mtp.{last}.confidence_head.calibration_offset"),
}
_OURS = ("calibration_scale", "calibration_offset")
_PLAIN_MTP = (
    "e_proj.weight e_proj.scale h_proj.weight h_proj.scale enorm.weight hnorm.weight norm.weight "
    "hc_head_fn hc_head_base hc_head_scale"
).split()


def target_entries(cfg: ModelConfig, naming: Naming = Naming.RELEASED) -> list[Entry]:
    """Every tensor of the target, leaf by leaf in the order of `Params`."""
    entries: list[Entry] = []
    for path, spec in flatten_specs(param_specs(cfg)):
        row = _TARGET[".".join(path)]
        names = row.hugging_face if naming is Naming.HUGGING_FACE else row.released
        entries += _entries(path, spec, names, _target_stack(cfg, path))
    if naming is Naming.HUGGING_FACE_SAVED:
        entries = [entry._replace(name=_saved_name(entry.name)) for entry in entries]
    return entries


def draft_entries(cfg: ModelConfig) -> list[Entry]:
    """Every tensor of the DSpark drafter, leaf by leaf in the order of `DraftParams`.

    The two calibration tensors are this project's own and optional: released files lack them.
    """
    specs = flatten_specs(draft_specs(cfg))  # raises when there is no drafter
    stages = cfg.draft.num_stages if cfg.draft else 0
    entries: list[Entry] = []
    for path, spec in specs:
        names = [n.replace("{last}", str(stages - 1)) for n in _DRAFT[".".join(path)].released]
        stack = [(i, i) for i in range(stages)] if path[0] == "stages" else None
        entries += _entries(path, spec, names, stack, optional=path[0] in _OURS)
    return entries


def plain_mtp_names(cfg: ModelConfig, stage: int = 0) -> set[str]:
    """Names of a multi-token-prediction block as checkpoints without DSpark carry it.

    Nothing here uses such a block; its names are known so that a loader can tell them from surprises.
    """
    rows = _nested("", _BLOCK, f"mtp.{stage}.")
    blocks = flatten_specs(block_specs(cfg, 1))
    entries = [
        entry
        for path, spec in blocks
        for entry in _entries(path, spec, rows[".".join(path)].released, [(0, 0)])
    ]
    names = {entry.name for entry in entries}
    names.update(entry.scale_name for entry in entries if entry.is_quantizable)
    names.update(f"mtp.{stage}.{name}" for name in _PLAIN_MTP)
    return names


def count_stages(names: Iterable[str]) -> int:
    """Number of drafter stages or prediction blocks: one more than the largest `mtp.<i>`."""
    matches = (re.match(r"mtp\.(\d+)\.", name) for name in names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def detect_naming(names: Iterable[str]) -> Naming:
    """Whose names a file uses, told by its embedding and output head.

    Raises `CheckpointError` when it has neither.
    """
    names = set(names)
    if "model.embed_tokens.weight" in names and "lm_head.weight" in names:
        return Naming.HUGGING_FACE
    if "model.embed_tokens.weight" in names:
        return Naming.HUGGING_FACE_SAVED
    if names.isdisjoint(("embed.weight", "head.weight", "norm.weight")):
        first = ", ".join(sorted(names)[:3])
        raise CheckpointError(f"these are no DeepSeek-V4 tensor names: {first or 'no tensors'}")
    return Naming.RELEASED


def flatten_specs(specs: Any) -> list[tuple[tuple[str, ...], Spec]]:
    """(path, Spec) of every leaf of a specification tree, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, Spec))
    return [(tuple(key.name for key in path), spec) for path, spec in leaves]


def _target_stack(cfg: ModelConfig, path: tuple[str, ...]) -> list[tuple[int, int]] | None:
    """(position in the stack, layer) for a leaf of `Params`; None for a leaf without a stack."""
    layers: Iterable[int]
    if path == ("blocks", "b_router"):
        # A layer routed by a table has no bias tensor; its row of the stack stays zero.
        return [(i, i) for i, kind in enumerate(cfg.layers) if kind.router is RouterKind.SCORE]
    if path[0] == "blocks":
        layers = range(cfg.num_hidden_layers)
    elif path[0] in ("csa", "indexer"):
        layers = cfg.indices_of(AttentionKind.CSA)
    elif path[0] == "hca":
        layers = cfg.indices_of(AttentionKind.HCA)
    elif path[0] == "tid2eid":
        layers = range(cfg.num_hash_layers)
    else:
        return None
    return list(enumerate(layers))


def _entries(
    path: tuple[str, ...],
    spec: Spec,
    names: Sequence[str],
    stack: Iterable[tuple[int, int]] | None,
    *,
    optional: bool = False,
) -> Iterator[Entry]:
    """Entries of one leaf. `stack` pairs positions in the stack with layer numbers; None: no stack."""
    experts = range(spec.shape[1]) if "{e}" in names[0] else None
    for position, layer in [(None, None)] if stack is None else stack:
        for expert in [None] if experts is None else experts:
            index = tuple(n for n in (position, expert) if n is not None)
            shape = spec.shape[len(index) :]
            height = shape[0] // len(names) if len(names) > 1 else None
            for part, name in enumerate(names):
                rows = slice(None)
                if height is not None:
                    rows = slice(part * height, (part + 1) * height)
                yield Entry(
                    name=name.format(i=layer, e=expert),
                    path=path,
                    index=index,
                    rows=rows,
                    shape=shape if height is None else (height, *shape[1:]),
                    storage=spec.storage,
                    optional=optional,
                )


def _saved_name(name: str) -> str:
    """What transformers 5.24 `save_pretrained` calls a released tensor."""
    if name == "head.weight":
        return name
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    if name.startswith("hc_head_"):
        return "model.hc_head.hc_" + name.removeprefix("hc_head_")
    return "model." + name.replace(".attn.kv_norm.", ".attn.norm.")
