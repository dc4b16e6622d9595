"""Compile a share of a server's programs and store them, without starting it.

    python -m dspark_jax.serving.precompile --share 0/4 --load-format dummy ...

Tracing holds Python's lock, so several processes compile faster than one with many threads. Run shares 0/N to
(N-1)/N side by side with the server's own flags and, on a GPU, XLA_PYTHON_CLIENT_PREALLOCATE=false; then start the
server.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence

from dspark_jax.config import ConfigError
from dspark_jax.serving.config import parse_flags
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.serve import limit_gpu_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Compile; 0 when done, 2 for bad flags."""
    args = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        share, rest = _take_share(args)
        config = parse_flags(rest)
        if config.load_format != "dummy":
            raise FlagError("only programs of --load-format dummy are known before the weights are")
        # Imported late: it loads JAX, which must find the memory limit set.
        limit_gpu_memory(config)
        from dspark_jax.serving.setup import Setup

        setup = Setup.from_config(config)
        params = setup.abstract_params()
        geometry = setup.lay_out(params)
        setup.executables(geometry).compile(
            params, setup.abstract_state(geometry), progress=True, share=share
        )
    except (FlagError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _take_share(args: list[str]) -> tuple[tuple[int, int], list[str]]:
    """(which, of how many), and the other flags."""
    if "--share" not in args[:-1]:
        raise FlagError("--share I/N is missing: 0/1 compiles everything")
    at = args.index("--share")
    match = re.fullmatch(r"(\d+)/(\d+)", args[at + 1])
    if match is None or int(match[1]) >= int(match[2]):
        raise FlagError(f"--share must be I/N with I below N, got {args[at + 1]!r}")
    return (int(match[1]), int(match[2])), args[:at] + args[at + 2 :]


if __name__ == "__main__":
    sys.exit(main())
