"""What the Triton lowering can address. Free of Pallas, which a CPU does without."""

from __future__ import annotations

from typing import Any

OFFSETS = 2**31
"""Elements that 32-bit offsets reach. 64-bit offsets begin at 2**32 *bytes*, but count elements."""


def reaches(elements: int, itemsize: int) -> bool:
    """Whether a kernel can reach all of an array of so many elements; false only for some of one byte each."""
    return not OFFSETS < elements <= 2**32 // itemsize


def is_addressable(array: Any) -> bool:
    """The same of an array, which may be abstract."""
    return reaches(array.size, array.dtype.itemsize)
