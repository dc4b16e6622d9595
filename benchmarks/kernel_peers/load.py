"""Find and load the peers' binaries, which come with the package vllm and are no part of this repository.

The folder given holds them as that package does: `_flashmla_C.abi3.so` and `third_party/deep_gemm`. The folder
`vllm` of an unpacked wheel serves as it is, and so does what `benchmarks/peers_pack.sh` packs, unpacked.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FLASH_MLA = Path("_flashmla_C.abi3.so")
DEEP_GEMM = Path("third_party/deep_gemm")


class PeerMissing(RuntimeError):
    """A peer that is not there, in one line."""


def require(path: Path) -> Path:
    """The path, or PeerMissing with what to do about it."""
    if not path.exists():
        raise PeerMissing(f"no {path}: see benchmarks/peers_pack.sh")
    return path


def load_flash_mla(folder: Path) -> Any:
    """FlashMLA's operators: `sparse_decode_fwd`, `sparse_prefill_fwd`."""
    import torch

    torch.ops.load_library(str(require(folder / FLASH_MLA).resolve()))
    return torch.ops._flashmla_C


def load_deep_gemm(folder: Path) -> Any:
    """The package deep_gemm. It compiles its kernels with nvcc when they first run."""
    parent = require(folder / DEEP_GEMM).resolve().parent
    nvcc = shutil.which("nvcc") or f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc"
    if not Path(nvcc).exists():
        raise PeerMissing(f"no {nvcc}, which DeepGEMM compiles its kernels with")
    # nvcc may be a link from a folder of programs: the library wants the toolkit's own folder.
    os.environ.setdefault("CUDA_HOME", str(Path(nvcc).resolve().parents[1]))
    os.environ.setdefault("DG_JIT_NVCC_COMPILER", nvcc)
    os.environ.setdefault("DG_JIT_CACHE_DIR", tempfile.mkdtemp(prefix="deep_gemm_"))
    _load_nvrtc(Path(os.environ["CUDA_HOME"]))
    sys.path.insert(0, str(parent))
    package = importlib.import_module("deep_gemm")
    package.set_pdl(True)  # kernels start while the one before ends, as vLLM has it
    return package


def _load_nvrtc(toolkit: Path) -> None:
    """Load libnvrtc, which the extension is linked against and torch need not have loaded.

    It lies in a package of pip's or in the toolkit, neither of which the loader searches. Where it is in neither,
    the import says whether it is missing.
    """
    folders = [*(Path(path) / "nvidia" for path in sys.path), toolkit / "lib64"]
    for library in (file for folder in folders for file in sorted(folder.rglob("libnvrtc.so.13"))):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        return
