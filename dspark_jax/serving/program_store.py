"""Compiled programs on disk, found by what they were made from, so that a warm start traces nothing.

JAX's own compilation cache is asked with the traced program, and tracing a step takes longer than loading it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import dspark_jax

logger = logging.getLogger(__name__)

_TRACED_FOLDERS = ("decode", "draft", "kernels", "model")


class ProgramStore:
    """One file per program, named after its key; safe for several processes at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._environment = _environment()

    def load_or_compile(
        self, key: str, arguments: Any, results: Any, compile: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """The stored program of `key`, or what `compile` returns, which is then stored.

        Args:
            key: names the program, its static options and the compiler's; versions, device and source are added
                here.
            arguments: tuple of abstract positional arguments.
            results: tree of the program's results, whatever its leaves.
            compile: traces and compiles.
        """
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), arguments)
        digest = hashlib.sha256(f"{self._environment}\n{key}\n{shapes}".encode()).hexdigest()
        path = self._folder / digest[:32]
        arguments_tree = jax.tree.structure((arguments, {}))
        results_tree = jax.tree.structure(results)
        try:
            payload = path.read_bytes()
            return serialize_executable.deserialize_and_load(payload, arguments_tree, results_tree)
        except FileNotFoundError:
            pass
        except (ValueError, EOFError, jax.errors.JaxRuntimeError) as error:
            logger.warning("stored program %s is unreadable and is compiled again: %s", path, error)
        compiled = compile()
        payload, _, _ = serialize_executable.serialize(compiled)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(payload)
        os.replace(file.name, path)
        return compiled


@contextmanager
def without_jax_cache() -> Iterator[None]:
    """Keep JAX from looking programs up in its own cache; a program of a `ProgramStore` must not come from there.

    XLA:CPU cannot serialize what was itself deserialized: the copy lacks its functions and fails when it runs.
    """
    config: Any = jax.config  # JAX's types lack its options
    enabled = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once per process whether there is one
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _environment() -> str:
    """What a program depends on beyond its key: versions, device, host processor, and the traced source."""
    source = hashlib.sha256()
    root = Path(dspark_jax.__file__).parent
    files = [root / "config.py"]
    files += [path for name in _TRACED_FOLDERS for path in sorted((root / name).rglob("*.py"))]
    for path in files:
        source.update(path.read_bytes())
    device = jax.devices()[0]
    return "\n".join(
        [
            jax.__version__,
            jaxlib.version.__version__,
            f"{device.platform} {device.device_kind} x{jax.device_count()}",
            _processor() if device.platform == "cpu" else "",
            os.environ.get("XLA_FLAGS", ""),
            source.hexdigest(),
        ]
    )


def _processor() -> str:
    """The host's instruction set: a program compiled for a newer processor would crash on an older one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
