"""What a dispatched step hands over when the drafter was called several times for it."""

import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.plan import RowPlan, StepPlan
from dspark_jax.serving.executor import DeviceStep
from tests.seeds import fresh_seed


def test_confidences_of_several_drafter_calls_come_back_in_the_order_of_rows() -> None:
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    confidences = rng.random((20, 3), np.float32)
    rows = tuple(RowPlan(slot=slot, limit=9, prompt_len=1) for slot in range(19))
    plan = StepPlan(
        rows=rows,
        page_table=np.zeros((20, 1), np.int32),
        budget=0,
        bucket=32,
        drafts=True,
    )
    ints = rng.integers(0, 99, (32, 7), np.int32)
    step = DeviceStep(
        plan=plan,
        ints=jnp.asarray(ints),
        confidences=(jnp.asarray(confidences[:16]), jnp.asarray(confidences[16:])),
        logprobs=None,
        prompt_logprobs=None,
    )
    outputs = step.fetch()
    assert step.is_ready()
    np.testing.assert_array_equal(outputs.confidences, confidences[:19], err_msg=f"seed {seed}")
    np.testing.assert_array_equal(outputs.tokens, ints[:19, :4], err_msg=f"seed {seed}")
