"""Parameters of the target: dataclasses of stacked arrays, their specifications, random initial values.

Every array that exists once per layer is stacked over the layers that have it, so a scan or a kernel takes the
whole stack and a layer index. Matrices are stored `[out, in]` as in the released files. A matrix leaf is a plain
array or a quantised `Weight`; everything else is a plain array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.linear import LayerWeight
from dspark_jax.kernels.quantized import Weight, by_column, take


class Hyper(struct.PyTreeNode):
    """One hyper-connection mix. N streams; L layers in front when stacked."""

    w_fn: jax.Array  # [L, (2+N)N, N*M] float32
    base: jax.Array  # [L, (2+N)N] float32
    scale: jax.Array  # [L, 3] float32


class HyperHead(struct.PyTreeNode):
    """The final collapse of the streams."""

    w_fn: jax.Array  # [N, N*M] float32
    base: jax.Array  # [N] float32
    scale: jax.Array  # [1] float32


class Block(struct.PyTreeNode):
    """What every layer has, stacked over L layers: sliding attention, experts and the mixes around both."""

    g_attn: jax.Array  # [L, M] norm before attention
    g_ffn: jax.Array  # [L, M] norm before the experts
    hyper_attn: Hyper
    hyper_ffn: Hyper
    w_q_a: Weight  # [L, q_lora, M]
    g_q: jax.Array  # [L, q_lora]
    w_q_b: Weight  # [L, H*D, q_lora]
    w_kv: Weight  # [L, D, M]
    g_kv: jax.Array  # [L, D]
    attn_sink: jax.Array  # [L, H] float32
    w_o_a: Weight  # [L, G*r, H*D/G]
    w_o_b: Weight  # [L, M, G*r]
    w_router: jax.Array  # [L, E, M]
    b_router: jax.Array  # [L, E] float32, selection only; zero where the router is a table
    w_gate_up: Weight  # [L, E, 2F, M] rows [0:F) gate (w1), [F:2F) up (w3)
    w_down: Weight  # [L, E, M, F]
    w_shared_gate_up: Weight  # [L, 2F, M]
    w_shared_down: Weight  # [L, M, F]


class Compressor(struct.PyTreeNode):
    """Gated pooling of m tokens into one entry, stacked over the layers that have it. k = 2 if overlapping."""

    w_kv_gate: jax.Array  # [L, 2*k*D, M] rows [0:kD) values, [kD:2kD) gates
    ape: jax.Array  # [L, m, k*D] float32, added to the gates by position within the window
    g_norm: jax.Array  # [L, D]


class Indexer(struct.PyTreeNode):
    """Chooses the compressed entries that a token of a CSA layer attends to."""

    w_q_b: Weight  # [L, Hi*I, q_lora]
    w_heads: jax.Array  # [L, Hi, M] weight of each indexer head
    compressor: Compressor  # D = I


class Params(struct.PyTreeNode):
    """The target model."""

    embed: jax.Array  # [V, M]
    head: jax.Array  # [V, M]
    g_norm: jax.Array  # [M]
    hyper_head: HyperHead
    blocks: Block  # all layers
    csa: Compressor | None  # CSA layers, in layer order
    indexer: Indexer | None  # the same layers
    hca: Compressor | None  # HCA layers
    tid2eid: jax.Array | None  # [hash layers, V, k] int32


_LINEARS = (
    "w_q_a",
    "w_q_b",
    "w_kv",
    "w_o_a",
    "w_o_b",
    "w_router",
    "w_shared_gate_up",
    "w_shared_down",
)


class Spec(NamedTuple):
    """Shape, logical axes and storage of one parameter leaf.

    `axes` has one logical name per dimension; `storage` is how a released checkpoint keeps it: "fp8", "expert"
    (fp4 or fp8 by `expert_dtype`), "bf16", "f32" or "i64".
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    storage: str
    init: str  # "matrix", "one", "zero", "sink", "table"


def leaf_spec(
    shape: tuple[int, ...], axes: tuple[str | None, ...], storage: str, init: str = "matrix"
) -> Any:
    """A `Spec`, typed as the array whose place it takes in a tree."""
    return Spec(shape, axes, storage, init)


def layer_block(stack: Block, layer: jax.Array | int, dispatch: Dispatch) -> Block:
    """One layer of a stack, without what is always read from the stack itself: routed experts, mixes, their norms.

    Matrices become `LayerWeight` where kernels read them.
    """
    rest = stack.replace(
        w_gate_up=None, w_down=None, hyper_attn=None, hyper_ffn=None, g_attn=None, g_ffn=None
    )
    return _cut(rest, layer, dispatch, _LINEARS)


def layer_indexer(stack: Indexer, layer: jax.Array | int, dispatch: Dispatch) -> Indexer:
    """One layer of a stack of indexers, as `layer_block`."""
    compressor = layer_compressor(stack.compressor, layer, dispatch)
    rest = stack.replace(compressor=None)
    return _cut(rest, layer, dispatch, ["w_q_b", "w_heads"]).replace(compressor=compressor)


def layer_compressor(stack: Compressor, layer: jax.Array | int, dispatch: Dispatch) -> Compressor:
    """One layer of a stack of compressors, as `layer_block`, without the norm: its gain is read from the stack."""
    return _cut(stack.replace(g_norm=None), layer, dispatch, ["w_kv_gate"])


def layer_matrix(stack: Weight, layer: jax.Array | int, dispatch: Dispatch) -> Weight | LayerWeight:
    """One matrix of a stack [L, N, K]: left in the stack where kernels read it, else cut out.

    A plain matrix with a side that kernels do not take, as that of a few heads, is cut out too.
    """
    is_odd = isinstance(stack, jax.Array) and any(side % 16 for side in stack.shape[1:])
    if dispatch.backend is Backend.PALLAS and not is_odd:
        return LayerWeight(stack, layer, dispatch)
    return take(stack, (layer,))


def _cut(stack: Any, layer: jax.Array | int, dispatch: Dispatch, linears: Sequence[str]) -> Any:
    matrices = {name: layer_matrix(getattr(stack, name), layer, dispatch) for name in linears}
    rest = jax.tree.map(lambda leaf: leaf[layer], stack.replace(**dict.fromkeys(linears)))
    return rest.replace(**matrices)


def vocabulary_params(params: Params) -> Params:
    """Only embedding and output head, which a drafter shares, None elsewhere: see `context_params`."""
    nothing = jax.tree.map(lambda leaf: None, params)
    return nothing.replace(embed=params.embed, head=params.head)


def params_by_column(params: Params) -> Params:
    """The same target with its float32 matrices as `by_column` keeps them: what a CPU serves with."""
    indexer = params.indexer
    if indexer is not None:
        indexer = _by_column(indexer, ["w_q_b", "w_heads"])
        indexer = indexer.replace(compressor=_by_column(indexer.compressor, ["w_kv_gate"]))
    return params.replace(
        head=by_column(params.head),
        blocks=block_by_column(params.blocks),
        csa=params.csa and _by_column(params.csa, ["w_kv_gate"]),
        indexer=indexer,
        hca=params.hca and _by_column(params.hca, ["w_kv_gate"]),
    )


def block_by_column(stack: Block) -> Block:
    """A stack of blocks with its float32 matrices as `by_column` keeps them."""
    return _by_column(stack, [*_LINEARS, "w_gate_up", "w_down"])


def _by_column(tree: Any, names: Sequence[str]) -> Any:
    return tree.replace(**{name: by_column(getattr(tree, name)) for name in names})


def block_specs(cfg: ModelConfig, layers: int) -> Block:
    """Specifications of `layers` stacked blocks: the target's, or a drafter's stages."""
    c, d, h = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads
    q, e, f = cfg.q_lora_rank, cfg.n_routed_experts, cfg.moe_intermediate_size
    group_in, group_out = h * d // cfg.o_groups, cfg.o_groups * cfg.o_lora_rank
    stack = _stacker(layers)
    return Block(
        g_attn=stack((c,), ("model",), "bf16", "one"),
        g_ffn=stack((c,), ("model",), "bf16", "one"),
        hyper_attn=_hyper_specs(cfg, stack),
        hyper_ffn=_hyper_specs(cfg, stack),
        w_q_a=stack((q, c), ("q_lora", "model"), "fp8"),
        g_q=stack((q,), ("q_lora",), "bf16", "one"),
        w_q_b=stack((h * d, q), ("heads", "q_lora"), "fp8"),
        w_kv=stack((d, c), ("latent", "model"), "fp8"),
        g_kv=stack((d,), ("latent",), "bf16", "one"),
        attn_sink=stack((h,), ("heads",), "f32", "sink"),
        w_o_a=stack((group_out, group_in), ("o_groups", None), "fp8"),
        w_o_b=stack((c, group_out), ("model", "o_groups"), "fp8"),
        w_router=stack((e, c), (None, "model"), "bf16"),
        b_router=stack((e,), (None,), "f32", "zero"),
        w_gate_up=stack((e, 2 * f, c), ("experts", "ffn", "model"), "expert"),
        w_down=stack((e, c, f), ("experts", "model", "ffn"), "expert"),
        w_shared_gate_up=stack((2 * f, c), ("ffn", "model"), "fp8"),
        w_shared_down=stack((c, f), ("model", "ffn"), "fp8"),
    )


def param_specs(cfg: ModelConfig) -> Params:
    """Specifications of the whole target, in the structure of `Params`."""
    c, v = cfg.hidden_size, cfg.vocab_size
    num_csa = len(cfg.indices_of(AttentionKind.CSA))
    num_hca = len(cfg.indices_of(AttentionKind.HCA))
    csa = indexer = hca = tid2eid = None
    if num_csa:
        stack = _stacker(num_csa)
        csa = _compressor_specs(cfg, stack, cfg.csa_ratio, cfg.head_dim, overlap=True)
        indexer = Indexer(
            w_q_b=stack(
                (cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank),
                ("index_heads", "q_lora"),
                "fp8",
            ),
            w_heads=stack((cfg.index_n_heads, c), ("index_heads", "model"), "bf16"),
            compressor=_compressor_specs(
                cfg, stack, cfg.csa_ratio, cfg.index_head_dim, overlap=True
            ),
        )
    if num_hca:
        hca = _compressor_specs(cfg, _stacker(num_hca), cfg.hca_ratio, cfg.head_dim, overlap=False)
    if cfg.num_hash_layers:
        shape = (cfg.num_hash_layers, v, cfg.num_experts_per_tok)
        tid2eid = leaf_spec(shape, (None, None, None), "i64", "table")
    return Params(
        embed=leaf_spec((v, c), ("vocab", "model"), "bf16"),
        head=leaf_spec((v, c), ("vocab", "model"), "bf16"),
        g_norm=leaf_spec((c,), ("model",), "bf16", "one"),
        hyper_head=hyper_head_specs(cfg),
        blocks=block_specs(cfg, cfg.num_hidden_layers),
        csa=csa,
        indexer=indexer,
        hca=hca,
        tid2eid=tid2eid,
    )


def hyper_head_specs(cfg: ModelConfig) -> HyperHead:
    """Specifications of a stream collapse."""
    n, c = cfg.hc_mult, cfg.hidden_size
    return HyperHead(
        w_fn=leaf_spec((n, n * c), (None, "streams_model"), "f32"),
        base=leaf_spec((n,), (None,), "f32", "zero"),
        scale=leaf_spec((1,), (None,), "f32", "one"),
    )


def init_params(specs: Any, key: jax.Array, dtype: Any = jnp.float32, experts: int = 0) -> Any:
    """Random initial values for a tree of `Spec`: unit-variance outputs for matrices, ones for norms.

    `experts` is the number of routed experts, needed only where a hash table is drawn. Matrices get `dtype`,
    everything stored in float32 stays float32.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, Spec))
    keys = jax.random.split(key, len(leaves))
    drawn = [_draw(spec, k, dtype, experts) for spec, k in zip(leaves, keys)]
    return jax.tree.unflatten(treedef, drawn)


def _draw(spec: Spec, key: jax.Array, dtype: Any, experts: int) -> jax.Array:
    kept = jnp.float32 if spec.storage == "f32" else dtype
    if spec.init == "one":
        return jnp.ones(spec.shape, kept)
    if spec.init in ("zero", "sink"):
        return jnp.zeros(spec.shape, kept)
    if spec.init == "table":
        # k distinct experts per token id: the k smallest of one uniform draw per expert.
        noise = jax.random.uniform(key, (*spec.shape[:2], experts))
        return jnp.argsort(noise, axis=-1)[..., : spec.shape[-1]].astype(jnp.int32)
    return (jax.random.normal(key, spec.shape) * spec.shape[-1] ** -0.5).astype(kept)


def _stacker(layers: int) -> Callable[..., Any]:
    def stack(
        shape: tuple[int, ...], axes: tuple[str | None, ...], storage: str, init: str = "matrix"
    ) -> Any:
        return leaf_spec((layers, *shape), ("layers", *axes), storage, init)

    return stack


def _hyper_specs(cfg: ModelConfig, stack: Callable[..., Any]) -> Hyper:
    n = cfg.hc_mult
    return Hyper(
        w_fn=stack(((2 + n) * n, n * cfg.hidden_size), (None, "streams_model"), "f32"),
        base=stack(((2 + n) * n,), (None,), "f32", "zero"),
        scale=stack((3,), (None,), "f32", "one"),
    )


def _compressor_specs(
    cfg: ModelConfig, stack: Callable[..., Any], ratio: int, width: int, *, overlap: bool
) -> Compressor:
    out = (2 if overlap else 1) * width
    return Compressor(
        w_kv_gate=stack((2 * out, cfg.hidden_size), ("latent", "model"), "bf16"),
        ape=stack((ratio, out), (None, "latent"), "f32", "zero"),
        g_norm=stack((width,), ("latent",), "bf16", "one"),
    )
