"""A real server process around the fake engine; prints its port. Run by `test_lifetime.py`."""

import sys
import threading
import time

from dspark_jax.serving.api.app import create_app
from dspark_jax.serving.lifetime import run_until_stopped
from dspark_jax.serving.serve import bind
from tests.serving.fake_engine import FakeEngine, make_backend


class SlowEngine(FakeEngine):
    """Ten steps a second; drains as the real one does. Fails when asked for `fail` seconds."""

    def __init__(self, fails_after_s: float) -> None:
        super().__init__("word " * 8, chunk_len=1)
        self.pause_s = 0.1
        if fails_after_s:
            timer = threading.Timer(fails_after_s, setattr, (self, "is_healthy", False))
            timer.daemon = True
            timer.start()

    def shutdown(self, drain: bool) -> None:
        super().shutdown(drain)
        while drain and self.num_running:
            time.sleep(0.02)


if __name__ == "__main__":
    engine = SlowEngine(float(sys.argv[1]))
    with bind("127.0.0.1", 0) as listener:
        print(listener.getsockname()[1], flush=True)
        backend = make_backend(engine)
        sys.exit(run_until_stopped(create_app(backend), listener, engine, metrics=None))
