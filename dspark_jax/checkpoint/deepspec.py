"""Loading drafters in DeepSpec's layout (`deepseek-ai/dspark_qwen3_*`): flat tensor names, no quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.check import check_tensors
from dspark_jax.checkpoint.names import Entry, flatten_specs
from dspark_jax.checkpoint.safetensors import TensorFolder
from dspark_jax.config import ConfigError
from dspark_jax.draft.dense_params import (
    DenseDraftConfig,
    DenseDraftParams,
    MarkovKind,
    dense_config_from_dict,
    dense_draft_specs,
)
from dspark_jax.model.params import Spec

# Published name of every leaf. {i} is the layer, {mix} the projection of the transition head.
_NAMES: Mapping[str, str] = {
    "embed": "embed_tokens.weight",
    "head": "lm_head.weight",
    "w_context": "fc.weight",
    "g_context": "hidden_norm.weight",
    "g_norm": "norm.weight",
    "layers.g_attn": "layers.{i}.input_layernorm.weight",
    "layers.g_mlp": "layers.{i}.post_attention_layernorm.weight",
    "layers.w_q": "layers.{i}.self_attn.q_proj.weight",
    "layers.w_k": "layers.{i}.self_attn.k_proj.weight",
    "layers.w_v": "layers.{i}.self_attn.v_proj.weight",
    "layers.w_o": "layers.{i}.self_attn.o_proj.weight",
    "layers.g_q": "layers.{i}.self_attn.q_norm.weight",
    "layers.g_k": "layers.{i}.self_attn.k_norm.weight",
    "layers.w_gate": "layers.{i}.mlp.gate_proj.weight",
    "layers.w_up": "layers.{i}.mlp.up_proj.weight",
    "layers.w_down": "layers.{i}.mlp.down_proj.weight",
    "markov.w1": "markov_head.markov_w1.weight",
    "markov.w2": "markov_head.markov_w2.weight",
    "markov.mix.w": "markov_head.{mix}.weight",
    "markov.mix.b": "markov_head.{mix}.bias",
    "confidence.w": "confidence_head.proj.weight",
    "confidence.b": "confidence_head.proj.bias",
}
_MIX = {MarkovKind.VANILLA: "", MarkovKind.GATED: "gate_proj", MarkovKind.RNN: "joint_proj"}


def load_deepspec(
    folder: str | Path, *, dtype: Any = jnp.float32
) -> tuple[DenseDraftConfig, DenseDraftParams]:
    """Read `config.json` and the tensors of a DeepSpec drafter, all in `dtype`, onto the default device.

    Raises `ConfigError` for a `config.json` that cannot be run, and `CheckpointError` with every missing,
    unexpected, misshapen or mistyped tensor in one message. A reduced draft vocabulary (`d2t`, `t2d`) is
    unexpected.
    """
    cfg = _read_config(Path(folder))
    source = TensorFolder(folder)
    leaves = [
        (spec, _leaf_entries(cfg, path, spec))
        for path, spec in flatten_specs(dense_draft_specs(cfg))
    ]
    check_tensors(folder, [entry for _, entries in leaves for entry in entries], source.infos)
    arrays = []
    for spec, entries in leaves:
        out = np.empty(spec.shape, np.dtype(dtype))
        for entry in entries:
            out[entry.index] = source[entry.name]
        arrays.append(jax.device_put(out))
    treedef = jax.tree.structure(dense_draft_specs(cfg), is_leaf=lambda x: isinstance(x, Spec))
    return cfg, jax.tree.unflatten(treedef, arrays)


def _leaf_entries(cfg: DenseDraftConfig, path: tuple[str, ...], spec: Spec) -> list[Entry]:
    name = _NAMES[".".join(path)].replace("{mix}", _MIX[cfg.markov_head_type])
    layers = [(i,) for i in range(spec.shape[0])] if path[0] == "layers" else [()]
    return [
        Entry(
            name=name.format(i=index[0]) if index else name,
            path=path,
            index=index,
            rows=slice(None),
            shape=spec.shape[len(index) :],
            storage=spec.storage,
        )
        for index in layers
    ]


def _read_config(folder: Path) -> DenseDraftConfig:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no config.json in {folder}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return dense_config_from_dict(raw)
