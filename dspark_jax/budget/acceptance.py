"""How much more, or less, is accepted than steps were sized for."""


class AcceptanceCorrection:
    """Bounded ratio accepted / promised of the drafts that were verified, with old ones forgotten.

    Promised is what the sizing of a step expected, from confidences of earlier proposals. They are
    calibrated once, at one temperature and on one kind of text: at temperature 0 a drafter so
    calibrated is too modest. A request without history counts as certain, and the largest of many
    uncertain predictions is too high. Survivals are multiplied by the ratio before a step is sized.

    Exactness: the ratio may be used for a proposal as long as it holds verdicts on earlier ones
    only (DSpark paper, section 5.2). A verdict that has landed before a step is dispatched is older
    than what that step verifies.
    """

    def __init__(
        self,
        *,
        half_life: float = 256.0,
        prior: float = 16.0,
        min_ratio: float = 0.5,
        max_ratio: float = 2.0,
    ) -> None:
        """
        Args:
            half_life: verified proposals after which a verdict has half its weight.
            prior: promised and accepted drafts that it starts from, so that the first verdicts
                don't move it far.
            min_ratio: lower bound, in (0, 1].
            max_ratio: upper bound, at least 1.

        Raises:
            ValueError: a length that isn't positive, or bounds that don't enclose 1.
        """
        if not (half_life > 0.0 and prior > 0.0):
            raise ValueError(f"half_life and prior must be positive, got {half_life} and {prior}")
        if not 0.0 < min_ratio <= 1.0 <= max_ratio:
            raise ValueError(f"ratio bounds must enclose 1, got {min_ratio}..{max_ratio}")
        self.half_life = half_life
        self.min_ratio = min_ratio
        self.max_ratio = max_ratio
        self._promised = prior
        self._accepted = prior

    def observe(self, promised: float, accepted: float, num_proposals: int) -> None:
        """Learn from one step's verdicts.

        Args:
            promised: accepted drafts that the step was sized for, before this correction.
            accepted: drafts that were accepted.
            num_proposals: proposals of which drafts were verified.
        """
        if not (num_proposals and promised > 0.0):
            return
        kept = 0.5 ** (num_proposals / self.half_life)
        self._promised = kept * self._promised + promised
        self._accepted = kept * self._accepted + accepted

    @property
    def ratio(self) -> float:
        """The factor for survivals."""
        if not self._promised > 0.0:
            return 1.0
        return min(max(self._accepted / self._promised, self.min_ratio), self.max_ratio)
