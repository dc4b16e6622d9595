"""What a drafter's confidences count as, whatever was computed."""

import numpy as np


def clean_confidences(confidences: np.ndarray) -> np.ndarray:
    """Confidences of any shape and dtype within 0 and 1; NaN counts as 0."""
    # Of NaN and 0, `fmax` takes 0.
    return np.minimum(np.fmax(confidences, 0.0), 1.0)
