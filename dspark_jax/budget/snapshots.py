"""Confidences on the host: always those of an earlier proposal than the one about to be verified.

Losslessness asks that whether a draft is verified depends only on what was known before it was
drawn (DSpark paper, section 5.2). The number of drafts is chosen from here, so nothing here may
come from the pending proposal.
"""

import numpy as np

NO_PROPOSAL = -1


class ConfidenceSnapshots:
    """The last two proposals' confidences of every slot, tagged with proposal serials.

    A *serial* is an integer ≥ 0 that rises with each proposal drafted in a slot, also from one
    request in the slot to the next; the number of the step that drafted serves well. Reading skips
    the pending proposal and takes the one before; where there is none the row reads 1.0: a request
    that has never drafted is believed.

    Rows belong to slots for the whole life of a request, so the order of a batch doesn't matter and
    a finished request needs no action. Admitting a request makes rows of the slot's previous
    request unreadable, those still in flight too.
    """

    def __init__(self, num_slots: int, draft_len: int, *, smoothing: float | None = None) -> None:
        """
        Args:
            num_slots: request slots.
            draft_len: positions per proposal.
            smoothing: weight of the newest proposal in an exponential average over the request's
                past proposals (0.8 is a good value); None keeps the newest as it is.
        """
        if smoothing is not None and not 0.0 < smoothing <= 1.0:
            raise ValueError(f"smoothing must be in (0, 1], got {smoothing}")
        self.smoothing = smoothing
        # Leading axis: newest, and the proposal before it.
        self._confidences = np.ones((2, num_slots, draft_len), dtype=np.float32)
        self._serials = np.full((2, num_slots), NO_PROPOSAL, dtype=np.int64)
        self._first_serials = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, first_serial: int) -> None:
        """Gives the slot to a new or re-admitted request.

        Its proposals will have serials from `first_serial` on; anything older is another's.
        """
        self._first_serials[slot] = first_serial
        self._serials[:, slot] = NO_PROPOSAL
        self._confidences[:, slot] = 1.0

    def record(self, slots: np.ndarray, serials: np.ndarray, confidences: np.ndarray) -> None:
        """Takes in one step's copy after it has landed on the host.

        A row is dropped if it carries no proposal (serial `NO_PROPOSAL`, such as a request still in
        its prompt), belongs to an earlier request of the slot, or repeats the newest serial (a
        request that kept its proposal for a step).

        Args:
            slots: int[N], distinct.
            serials: int[N], serial of the proposal each row belongs to.
            confidences: float32[N, G].

        Raises:
            ValueError: a row is older than what its slot already has; copies must be recorded in
                the order of steps.
        """
        newest = self._serials[0, slots]
        is_current = (serials != NO_PROPOSAL) & (serials >= self._first_serials[slots])
        if (is_current & (serials < newest)).any():
            late = slots[is_current & (serials < newest)]
            raise ValueError(
                f"confidences of slots {late.tolist()} arrived after those of a later proposal"
            )
        is_taken = is_current & (serials > newest)
        taken, rows = slots[is_taken], confidences[is_taken].astype(np.float32)
        if self.smoothing is not None:
            past = self._confidences[0, taken]
            is_first = newest[is_taken] == NO_PROPOSAL
            weight = np.where(is_first, 1.0, self.smoothing).astype(np.float32)[:, None]
            rows = past + weight * (rows - past)
        self._confidences[1, taken] = self._confidences[0, taken]
        self._serials[1, taken] = newest[is_taken]
        self._confidences[0, taken] = rows
        self._serials[0, taken] = serials[is_taken]

    def read(self, slots: np.ndarray, pending_serials: np.ndarray) -> np.ndarray:
        """Confidences to size a step with, float32[N, G].

        Args:
            slots: int[N], slots of the scheduled requests, in any order.
            pending_serials: int[N], serial of the proposal each request will have verified,
                `NO_PROPOSAL` for none.
        """
        return self._confidences[self._readable(slots, pending_serials), slots]

    def is_believed(self, slots: np.ndarray, pending_serials: np.ndarray) -> np.ndarray:
        """Which rows `read` gives as 1.0 for want of an earlier proposal, bool[N]."""
        return self._serials[self._readable(slots, pending_serials), slots] == NO_PROPOSAL

    def _readable(self, slots: np.ndarray, pending_serials: np.ndarray) -> np.ndarray:
        """0 where the newest proposal may be read, 1 where that is the pending one, int[N]."""
        is_pending = (self._serials[0, slots] >= pending_serials) & (pending_serials != NO_PROPOSAL)
        return is_pending.astype(np.int64)
