"""Legend of axis letters, and the decorator that checks them when a function is traced.

T  tokens in a bucket          R  request rows               G  draft positions
H  query heads                 D  latent or head width       K  entries listed per token
P  pages                       S  entries per page           V  vocabulary
E  experts                     F  expert width               M  model width
N  hyper-connection streams    W  sliding window             L  layers of a stack
I  indexer head width          C  rows that need logits
"""

from __future__ import annotations

from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, jaxtyped

__all__ = ["Array", "Bool", "Float", "Int", "typed"]


def typed(function):
    """Check the jaxtyping annotations of `function` at trace time: shapes must agree by letter."""
    return jaxtyped(typechecker=beartype)(function)
