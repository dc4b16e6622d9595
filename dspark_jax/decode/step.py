"""The verifying half of an engine step as a pure function: admit drafts, run the target, verify, commit.

Nothing that the device decides here is needed by the host to launch the next step: lengths, anchors and proposals
stay in the state. The host chose only totals (the plan's budget and bucket). The drafting half is
`decode.draft_step`: this one is sized by tokens, that one by requests.
"""

from __future__ import annotations

from flax import struct

from dspark_jax.config import ModelConfig
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.options import StepOptions
from dspark_jax.decode.packing import PackedPlan
from dspark_jax.decode.score import score
from dspark_jax.decode.settle import DeviceOutputs, settle
from dspark_jax.decode.state import DecodeState
from dspark_jax.draft.params import DraftParams
from dspark_jax.model.params import Params


class ModelParams(struct.PyTreeNode):
    """Target and drafter; `draft` None decodes without speculation."""

    target: Params
    draft: DraftParams | None


def verify_step(
    params: ModelParams,
    state: DecodeState,
    plan: PackedPlan,
    *,
    cfg: ModelConfig,
    options: StepOptions,
    effort: Effort = Effort.AS_NEEDED,
) -> tuple[DecodeState, DeviceOutputs]:
    """Advance every planned row: its pending draft is verified or its prompt chunk fed, and one token is drawn.

    Afterwards no touched slot has a pending draft; `draft_step` makes the next.
    """
    with_taps = params.draft is not None
    cache, scored = score(params.target, state, plan, cfg=cfg, options=options, with_taps=with_taps)
    state = state.replace(cache=cache)
    return settle(params.draft, state, plan.rows, scored, cfg=cfg, options=options, effort=effort)
