"""Where the event loops and the engine's thread meet: requests come in, closed ones are taken back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from dspark_jax.serving.sequence import Sequence, Status
from dspark_jax.serving.streams import Stream


class EngineUnavailable(RuntimeError):
    """The engine takes no request now: it is shutting down, has failed, or too many requests are open."""


class Intake:
    """Requests on their way to the engine's thread, and whether it takes any. Every method may be called anywhere.

    A request is open from `open` to `close`, however early it ended; the number of open ones is bounded.
    """

    def __init__(self, max_open_requests: int) -> None:
        self._max_open_requests = max_open_requests
        self._wake = threading.Condition()
        self._arrivals: list[tuple[Sequence, Stream]] = []
        self._closings: list[Sequence] = []
        self._open_ids: set[str] = set()
        self._is_asleep = False
        self._refusal: str | None = "the engine has not started"
        self.failure: str | None = None
        self.is_draining = False
        self.is_aborting = False

    def start(self) -> None:
        """Take requests from now on."""
        with self._wake:
            self._refusal = None

    def check(self) -> None:
        """Raise `EngineUnavailable`, with the reason, while no request is taken."""
        if self._refusal is not None:
            raise EngineUnavailable(self._refusal)
        if len(self._open_ids) >= self._max_open_requests:
            raise EngineUnavailable(f"{len(self._open_ids)} requests are open; try again later")

    def open(self, sequence: Sequence) -> Stream:
        """Register a request; its chunks will come over the stream, on the running event loop.

        Raises like `check`, and ValueError for an id that is open already.
        """
        request_id = sequence.request.request_id
        stream = Stream(request_id)
        with self._wake:
            self.check()
            if request_id in self._open_ids:
                raise ValueError(f"a request with the id {request_id!r} is open already")
            self._open_ids.add(request_id)
            self._arrivals.append((sequence, stream))
            self._wake.notify()
        return stream

    def close(self, sequence: Sequence) -> None:
        """The client is done with the request; if the engine isn't, it is told."""
        with self._wake:
            self._open_ids.discard(sequence.request.request_id)
            if sequence.status is not Status.FINISHED:
                self._closings.append(sequence)
                self._wake.notify()

    def forget(self, request_id: str) -> None:
        """The event loop of the request is gone, and with it whoever would have closed it."""
        with self._wake:
            self._open_ids.discard(request_id)

    def drain(self, *, abort: bool) -> None:
        """Refuse requests from now on; with `abort`, ask the engine to end the open ones too."""
        with self._wake:
            self.is_draining = True
            self.is_aborting |= abort
            self._refusal = self._refusal or "the engine is shutting down"
            self._wake.notify()

    def fail(self, reason: str) -> list[tuple[Sequence, Stream]]:
        """Refuse requests from now on, for this reason; returns those nobody has taken."""
        with self._wake:
            self.failure = reason
            self._refusal = f"the engine has failed: {reason}"
            return self._take_arrivals()

    def wait(self) -> bool:
        """Sleep until requests have come or gone; False if there will be no more."""
        with self._wake:
            while not (self._arrivals or self._closings):
                if self.is_draining:
                    return False
                self._is_asleep = True
                self._wake.wait()
                self._is_asleep = False
        return True

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """While the block runs no request comes and the engine's thread sleeps in `wait`.

        Raises `EngineUnavailable` when requests are open or the engine is at work.
        """
        with self._wake:
            self.check()
            if self._open_ids or self._arrivals or not self._is_asleep:
                raise EngineUnavailable("requests are running")
            yield

    def take(self) -> tuple[list[tuple[Sequence, Stream]], list[Sequence]]:
        """New requests with their streams, and sequences whose clients have left, in that order."""
        with self._wake:
            closings, self._closings = self._closings, []
            return self._take_arrivals(), closings

    def _take_arrivals(self) -> list[tuple[Sequence, Stream]]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals
