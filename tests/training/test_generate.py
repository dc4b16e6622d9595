"""The sampler is the model: what it drew, and how probable it thought that was, agree with teacher forcing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.model.params import param_specs
from dspark_jax.training.forward import forward, logits
from dspark_jax.training.generate import sample
from tests.parity.compare import Tolerance, assert_close
from tests.training.tiny import SHALLOW, perturbed

LENGTH = 48
LOGPROB = Tolerance(1e-4, 1e-4, 1e-8)


def test_logprobs_equal_teacher_forcing_and_draws_follow_them():
    params = perturbed(param_specs(SHALLOW), seed=7)
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, SHALLOW.vocab_size, (64, LENGTH)).astype(np.int32)
    prompt_lens = draw.integers(1, 20, 64)
    prompts[:32] = prompts[0]
    prompt_lens[:32] = 9

    out = sample(params, SHALLOW, prompts, prompt_lens, jax.random.key(1))

    given = np.arange(LENGTH) < prompt_lens[:, None]
    np.testing.assert_array_equal(np.asarray(out.tokens)[given], prompts[given])
    hidden = jax.jit(lambda p, ids: forward(p, SHALLOW, ids).hidden)(params, out.tokens)
    predicted = jax.nn.log_softmax(logits(params, hidden))
    expected = jnp.take_along_axis(predicted[:, :-1], out.tokens[:, 1:, None], axis=-1)[..., 0]
    assert_close(out.logprobs[:, 1:], expected, LOGPROB)

    # Surprise averages to entropy where the token was drawn: 64 x ~38 draws, six standard errors.
    entropy = -jnp.sum(jnp.exp(predicted) * predicted, axis=-1)[:, :-1]
    excess = np.asarray(-expected - entropy)[~given[:, 1:]]
    assert abs(excess.mean()) < 6 * excess.std() / len(excess) ** 0.5
    assert len({tuple(row) for row in np.asarray(out.tokens[:32]).tolist()}) > 30


def test_a_later_part_of_a_text_is_the_same_text():
    params = perturbed(param_specs(SHALLOW), seed=7)
    prompts = np.random.default_rng(0).integers(0, SHALLOW.vocab_size, (4, LENGTH))
    prompt_lens = np.array([20, 24, 30, 47])
    whole = sample(params, SHALLOW, prompts, prompt_lens, jax.random.key(1))
    part = sample(params, SHALLOW, prompts, prompt_lens, jax.random.key(1), offset=17, length=20)
    np.testing.assert_array_equal(part.tokens, whole.tokens[:, 17:37])
    assert_close(part.logprobs[:, 1:], whole.logprobs[:, 18:37], LOGPROB)
    for ours, theirs in zip(part.features, whole.features, strict=True):
        assert_close(ours, theirs[17:36], LOGPROB)
