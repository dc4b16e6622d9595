"""Entry point of `python -m dspark_jax.serving.bench`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
