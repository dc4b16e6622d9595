"""`python -m dspark_jax.checkpoint.convert SRC DST --to orbax|safetensors`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.checkpoint.store import is_store, restore_store, save_store
from dspark_jax.config import ConfigError

# What a server reads beside config.json and the tensors.
_COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Convert a checkpoint between the released safetensors layout and an orbax store."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder with safetensors files (released or Hugging Face naming), or an orbax store."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder to write."""
    to: Literal["orbax", "safetensors"]
    """Layout of DST."""
    keep_quantized: bool = True
    """Of safetensors: keep fp8 and fp4 matrices as they are; otherwise expand them to DTYPE."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of safetensors: what is not kept quantised becomes this; bfloat16 halves a store."""
    quantize: bool = True
    """To safetensors: round plain matrices to the released formats; otherwise write float32."""
    draft: bool = True
    """Take the DSpark drafter along."""
    max_shard_gb: float = 4.0
    """To safetensors: size limit of one file, in 10^9 bytes."""


def convert(job: Conversion) -> None:
    """Run one conversion on the host's CPU. Raises `CheckpointError` or `ConfigError`."""
    with jax.default_device(jax.devices("cpu")[0]):
        if is_store(job.src):
            cfg, params, draft_params = restore_store(job.src, draft=job.draft)
        else:
            cfg, params, draft_params = load_checkpoint(
                job.src,
                dtype=job.dtype,
                keep_quantized=job.keep_quantized,
                draft=job.draft,
                progress=True,
            )
        if job.to == "orbax":
            save_store(job.dst, cfg, params, draft_params)
        else:
            export_checkpoint(
                job.dst,
                cfg,
                params,
                draft_params,
                quantize=job.quantize,
                max_shard_bytes=int(job.max_shard_gb * 1e9),
                progress=True,
            )
    for name in _COMPANIONS:
        if (job.src / name).exists():
            shutil.copyfile(job.src / name, job.dst / name)


def main(args: list[str] | None = None) -> None:
    """Command line entry; ends with a one-line message for a checkpoint that cannot be converted."""
    job = tyro.cli(Conversion, args=args)
    try:
        convert(job)
    except (CheckpointError, ConfigError) as error:
        raise SystemExit(f"convert: {error}") from error


if __name__ == "__main__":
    main()
