"""Adaptive verification on the host, NumPy only: step costs and the drafts worth verifying."""

from dspark_jax.budget.acceptance import AcceptanceCorrection
from dspark_jax.budget.allocate_reference import (
    StepLayout,
    allocate,
    host_placeholder,
    step_layout,
)
from dspark_jax.budget.confidences import clean_confidences
from dspark_jax.budget.correction import LiveCorrection
from dspark_jax.budget.cost_profile import (
    ProfileSample,
    ProfileShape,
    curves_from_samples,
    load_profile,
    profile_plan,
    read_profile,
    resolve_context_len,
    save_profile,
)
from dspark_jax.budget.cost_table import CostCurves, CostTable, expand_curve
from dspark_jax.budget.optimizer import (
    BudgetDecision,
    BudgetLimits,
    BudgetPolicy,
    choose_budget,
    logit_rows_in_chunk,
)
from dspark_jax.budget.skipper import DraftMode, DraftSkipper
from dspark_jax.budget.snapshots import NO_PROPOSAL, ConfidenceSnapshots

__all__ = [
    "NO_PROPOSAL",
    "AcceptanceCorrection",
    "BudgetDecision",
    "BudgetLimits",
    "BudgetPolicy",
    "ConfidenceSnapshots",
    "CostCurves",
    "CostTable",
    "DraftMode",
    "DraftSkipper",
    "LiveCorrection",
    "ProfileSample",
    "ProfileShape",
    "StepLayout",
    "allocate",
    "choose_budget",
    "clean_confidences",
    "curves_from_samples",
    "expand_curve",
    "host_placeholder",
    "load_profile",
    "logit_rows_in_chunk",
    "profile_plan",
    "read_profile",
    "resolve_context_len",
    "save_profile",
    "step_layout",
]
