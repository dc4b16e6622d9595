"""The model of the large sweep: DeepSeek-V4-Flash's config.json, cut to the layers that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark_jax.config import ConfigError

FLASH = Path(__file__).parent / "models" / "deepseek_v4_flash_dspark"


def overrides_for(model: Path, *, layers: int | None, draft_len: int) -> dict[str, Any]:
    """The server's `--hf-overrides` for the first `layers` layers (all if None) and another draft length.

    The layers keep the model's own order of kinds, and the drafter reads the last ones that are left. Raises
    `ConfigError` when fewer layers than the drafter reads are asked for, or more than there are.
    """
    raw = json.loads((model / "config.json").read_text())
    overrides: dict[str, Any] = {}
    if layers is not None:
        taps, most = len(raw["dspark_target_layer_ids"]), raw["num_hidden_layers"]
        if not taps <= layers <= most:
            raise ConfigError(f"layers must lie in {taps}..{most}, got {layers}")
        overrides["num_hidden_layers"] = layers
        overrides["dspark_target_layer_ids"] = list(range(layers - taps, layers))
    if raw["dspark_block_size"] != draft_len:
        overrides["dspark_block_size"] = draft_len
    return overrides
