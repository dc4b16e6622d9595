"""The error of a flag that cannot be honoured."""

from __future__ import annotations


class FlagError(Exception):
    """A flag that cannot be honoured; the message is one line and names the remedy.

    Not a `ValueError`, which tyro would catch and print in a box of its own.
    """
