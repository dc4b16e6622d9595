"""Speculative decoding: same text as plain decoding where it must be, same law elsewhere."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from tests.seeds import fresh_seed
from tests.torch_ref.configs import dense_config, dense_weights, tiny_dspark_config
from torch_ref.decode import greedy_no_cache
from torch_ref.dense_draft import DenseDrafter
from torch_ref.draft import DSparkDrafter
from torch_ref.heads import Choose, Proposal
from torch_ref.noise import Noise
from torch_ref.random_weights import random_weights
from torch_ref.speculative import generate, sample_no_cache, verify_by_rejection

# With eight tokens to choose from, even an untrained drafter is often right.
CFG = tiny_dspark_config(vocab_size=8)
PROMPT = [5, 2, 7, 7, 1, 4, 0, 6, 3, 3]


def make_drafter(layout: str, weights, seed: int):
    if layout == "mtp":
        return DSparkDrafter(weights, CFG)
    dense = dense_config(vocab_size=8, hidden_size=CFG.hidden_size, markov_head_type=layout)
    return DenseDrafter(dense_weights(dense, seed), dense)


class RiggedDrafter:
    """Proposes a known continuation, each token of it replaced with probability one quarter."""

    draft_len = 5
    target_layer_ids = (0,)

    def __init__(self, prompt_len: int, continuation: list[int], rng: random.Random) -> None:
        self.length = 0
        self._known, self._rng = [None] * prompt_len + continuation + [0] * 10, rng

    def extend(self, features: Tensor) -> None:
        self.length += len(features)

    def propose(self, anchor: int, choose: Choose) -> Proposal:
        assert anchor == self._known[self.length], "the anchor is not the token at its position"
        right = self._known[self.length + 1 : self.length + 6]
        tokens = [self._rng.randrange(8) if self._rng.random() < 0.25 else t for t in right]
        return Proposal(torch.tensor(tokens), torch.zeros(5, 8), None)


@pytest.mark.parametrize("layout", ["mtp", "vanilla", "gated", "rnn"])
def test_greedy_text_equals_plain_greedy(layout):
    seed = fresh_seed()
    rng = random.Random(seed)
    weights = random_weights(CFG, seed)
    result = generate(
        weights,
        CFG,
        make_drafter(layout, weights, seed),
        PROMPT,
        20,
        choose_verify_len=lambda _: rng.randint(0, 5),
    )
    assert result.tokens == greedy_no_cache(weights, CFG, PROMPT, 20)


def test_greedy_text_with_a_good_drafter():
    seed = fresh_seed()
    rng = random.Random(seed)
    weights = random_weights(CFG, seed)
    expected = greedy_no_cache(weights, CFG, PROMPT, 40)
    drafter = RiggedDrafter(len(PROMPT), expected, rng)
    result = generate(
        weights, CFG, drafter, PROMPT, 40, choose_verify_len=lambda _: rng.randint(0, 5)
    )
    assert result.tokens == expected
    assert sum(result.accept_lens) >= 5
    assert all(a <= v for a, v in zip(result.accept_lens, result.verify_lens))


@pytest.mark.parametrize("layout", ["mtp", "rnn"])
def test_coupled_text_equals_plain_sampling(layout):
    seed = fresh_seed()
    rng = random.Random(seed)
    weights = random_weights(CFG, seed)
    result = generate(
        weights,
        CFG,
        make_drafter(layout, weights, seed),
        PROMPT,
        30,
        temperature=0.9,
        seed=seed,
        method="coupled",
        choose_verify_len=lambda _: rng.randint(0, 5),
    )
    expected = sample_no_cache(weights, CFG, PROMPT, 30, temperature=0.9, seed=seed)
    assert result.tokens == expected


def test_coupling_accepts_more_than_chance():
    """Shared noise makes equal draws likely: at least (1 - TV) / (1 + TV) of the time."""
    weights = random_weights(CFG, 1)
    accepted = rounds = 0
    for seed in range(2):
        drafter = DSparkDrafter(weights, CFG)
        result = generate(
            weights, CFG, drafter, PROMPT, 40, temperature=3.0, seed=seed, method="coupled"
        )
        accepted, rounds = accepted + sum(result.accept_lens), rounds + len(result.accept_lens)
    assert accepted / rounds > 0.5


def test_stop_token_ends_the_text_inside_a_draft():
    weights = random_weights(CFG, 2)
    expected = greedy_no_cache(weights, CFG, PROMPT, 30)
    stop = expected[12]
    end = expected.index(stop) + 1
    drafter = RiggedDrafter(len(PROMPT), expected, random.Random(3))
    result = generate(weights, CFG, drafter, PROMPT, 30, stop_ids={stop})
    assert result.tokens == expected[:end]


# Laws that depend on the tokens before: rows are indexed by the previous token.
P1 = torch.tensor([0.5, 0.3, 0.2])
P2 = torch.tensor([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1], [0.3, 0.3, 0.4]])
P3 = torch.tensor([[0.25, 0.25, 0.5], [0.7, 0.2, 0.1], [0.05, 0.9, 0.05]])
Q1 = torch.tensor([0.2, 0.7, 0.1])
Q2 = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]])


def draw(probs: Tensor, noise: Noise, stream: str) -> int:
    return int((probs.log() + noise.gumbel(len(probs), stream)).argmax())


def chi_square_limit(cells: int) -> float:
    """Passed by chance once in a billion runs."""
    return float(chi2.isf(1e-9, cells - 1))


@pytest.mark.parametrize("rule", ["fixed 0", "fixed 1", "fixed 2", "stop before an unsure slot"])
def test_rejection_sampling_has_the_law_of_the_target(rule):
    seed = fresh_seed()
    counts = torch.zeros(3, 3, 3, dtype=torch.float64)
    num_samples = 2000
    for index in range(num_samples):
        noise = Noise(seed * num_samples + index)
        x1 = draw(Q1, noise, "q1")
        x2 = draw(Q2[x1], noise, "q2")
        # Slot 2 is verified or not by a rule on x1: allowed, x1 precedes it.
        verify_len = int(rule[-1]) if rule.startswith("fixed") else 1 + int(x1 != 1)
        accepted, token = verify_by_rejection(
            torch.stack([P1, P2[x1], P3[x2]])[: verify_len + 1],
            torch.stack([Q1, Q2[x1]])[:verify_len],
            [x1, x2][:verify_len],
            noise,
            10,
        )
        text = [x1, x2][:accepted] + [token]
        while len(text) < 3:
            law = [P1, P2, P3][len(text)]
            text.append(draw(law[text[-1]], noise, f"plain {len(text)}"))
        counts[tuple(text)] += 1
    expected = num_samples * torch.einsum("a,ab,bc->abc", P1, P2, P3).double()
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(27)


@pytest.mark.parametrize(("peeks", "expected"), [(False, 0.5), (True, 0.65)])
def test_a_length_that_peeks_at_the_token_is_biased(peeks, expected):
    """Paper, appendix A: dropping a draft for what it would lead to changes the law."""
    seed = fresh_seed()
    p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[0.7, 0.3]])
    num_samples, first = 3000, 0
    for index in range(num_samples):
        noise = Noise(seed * num_samples + index)
        x1 = draw(q[0], noise, "q1")
        verify_len = int(x1 == 0) if peeks else 1
        accepted, token = verify_by_rejection(
            p[: verify_len + 1], q[:verify_len], [x1][:verify_len], noise, 10
        )
        first += ([x1][:accepted] + [token])[0] == 0
    # Six standard deviations of the count.
    assert first / num_samples == pytest.approx(expected, abs=6 * 0.5 / num_samples**0.5)


def test_impossible_draft_is_rejected_and_equal_laws_accept():
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for seed in range(20):
        assert verify_by_rejection(p, torch.tensor([[1.0, 0.0]]), [0], Noise(seed), 0) == (0, 1)
        assert verify_by_rejection(p, p[:1], [1], Noise(seed), 0) == (1, 0)


def test_noise_depends_on_its_key_alone():
    noise = Noise(fresh_seed())
    keys = [("a", 1), ("a", 2), ("b", 1), ("a", 1, 2), ("a", 12)]
    drawn = {key: noise.gumbel(5, *key) for key in keys}
    for one, other in itertools.combinations(keys, 2):
        assert not torch.equal(drawn[one], drawn[other]), (one, other)
    for key in reversed(keys):
        assert torch.equal(noise.gumbel(5, *key), drawn[key])
    uniforms = torch.tensor([noise.uniform("u", index) for index in range(2000)])
    assert uniforms.mean() == pytest.approx(0.5, abs=0.05)
    gumbels = noise.gumbel(20000, "g")
    assert gumbels.mean() == pytest.approx(0.5772, abs=0.06)


@pytest.mark.parametrize(
    ("prompt", "n", "method", "message"),
    [([1], 1, "block", "'block'"), ([1], 0, "standard", "n=0"), ([], 1, "coupled", "empty")],
)
def test_what_cannot_be_generated_is_refused(prompt, n, method, message):
    drafter = RiggedDrafter(0, [], random.Random(0))
    with pytest.raises(ValueError, match=message):
        generate({}, CFG, drafter, prompt, n, method=method)
