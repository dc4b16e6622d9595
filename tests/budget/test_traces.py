"""Synthetic and recorded streams of proposals."""

import itertools
import json

import numpy as np
import pytest

from dspark_jax.budget.traces import FLASH_SURVIVAL, RecordedTrace, SyntheticTrace, load_recorded
from tests.seeds import fresh_seed


def propose_all(trace, num_slots, num_steps, *, restart_every=20):
    slots = np.arange(num_slots)
    pairs = []
    for step in range(num_steps):
        if step % restart_every == 0:
            trace.restart(slots)
        pairs.append(trace.propose(slots))
    return np.stack([c for c, _ in pairs]), np.stack([a for _, a in pairs])


def test_synthetic_survival_is_as_asked():
    trace = SyntheticTrace(400, FLASH_SURVIVAL, np.random.default_rng(fresh_seed()))
    confidences, accept_lens = propose_all(trace, 400, 100)
    assert confidences.dtype == np.float32
    survival = np.cumprod(confidences.astype(np.float64), axis=-1).mean(axis=(0, 1))
    np.testing.assert_allclose(survival, FLASH_SURVIVAL, atol=0.02)
    # Calibrated: outcomes are as frequent as the confidences say.
    realised = [(accept_lens > i).mean() for i in range(7)]
    np.testing.assert_allclose(realised, survival, atol=0.02)


def test_synthetic_requests_differ_and_steps_are_correlated():
    trace = SyntheticTrace(400, FLASH_SURVIVAL, np.random.default_rng(fresh_seed()))
    confidences, _ = propose_all(trace, 400, 20, restart_every=100)
    first = confidences[:, :, 0]
    within = first.std(axis=0).mean()
    assert first.mean(axis=0).std() > 0.3 * within
    neighbours = np.mean([np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(first)])
    distant = np.mean([np.corrcoef(first[i], first[i + 10])[0, 1] for i in range(10)])
    assert neighbours > distant + 0.1 > 0.3


@pytest.mark.parametrize("survival", [(), (0.5, 0.5), (1.0,), (0.5, 0.0)])
def test_synthetic_survival_must_descend(survival):
    with pytest.raises(ValueError, match="survival"):
        SyntheticTrace(1, survival, np.random.default_rng(0))


def test_recorded_requests_are_played_in_order_from_their_start():
    # Interleaved as a server would log them; confidence encodes request and step.
    request_ids = np.array(["a", "b", "a", "b", "a"])
    confidences = np.array([[0.10], [0.20], [0.11], [0.21], [0.12]], dtype=np.float32)
    trace = RecordedTrace(
        2, request_ids, confidences, np.array([1, 0, 0, 1, 1]), np.random.default_rng(fresh_seed())
    )
    played = [trace.propose(np.array([0])) for _ in range(60)]
    text = " ".join(f"{c[0, 0]:.2f}/{a[0]}" for c, a in played)
    a, b = "0.10/1 0.11/0 0.12/1", "0.20/0 0.21/1"
    rest = text.replace(a, "").replace(b, "").strip()
    assert a in text
    assert b in text
    # What is left is the beginning of the request that was being played at the end.
    assert rest in ("", "0.10/1", "0.10/1 0.11/0", "0.20/0")


def test_recorded_outcomes_are_drawn_from_the_confidences_when_missing():
    confidences = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]], dtype=np.float32)
    trace = RecordedTrace(
        1, np.array([0, 1]), confidences, None, np.random.default_rng(fresh_seed())
    )
    for _ in range(20):
        shown, accepted = trace.propose(np.array([0]))
        assert accepted[0] == (2 if shown[0, 0] == 1.0 else 0)


def test_recorded_arrays_must_fit():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="equal lengths"):
        RecordedTrace(1, np.arange(3), np.ones((2, 1)), None, rng)
    with pytest.raises(ValueError, match="N, G"):
        RecordedTrace(1, np.arange(0), np.ones((0, 1)), None, rng)


@pytest.mark.parametrize("with_outcomes", [True, False])
def test_both_file_formats_say_the_same(tmp_path, with_outcomes):
    request_ids = np.array([4, 4, 7])
    confidences = np.array([[0.5, 0.25], [1.0, 0.5], [0.125, 0.0]], dtype=np.float32)
    accept_lens = np.array([1, 2, 0])
    arrays = {"request_ids": request_ids, "confidences": confidences}
    rows = [
        {"request_id": int(r), "confidences": c.tolist()}
        for r, c in zip(request_ids, confidences, strict=True)
    ]
    if with_outcomes:
        arrays["accept_lens"] = accept_lens
        for row, n in zip(rows, accept_lens, strict=True):
            row["accept_len"] = int(n)
    np.savez(tmp_path / "record.npz", **arrays)
    (tmp_path / "record.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name in ("record.npz", "record.jsonl"):
        ids, read, lens = load_recorded(tmp_path / name)
        assert ids.tolist() == request_ids.tolist()
        assert read.tobytes() == confidences.tobytes()
        assert (None if lens is None else lens.tolist()) == (
            accept_lens.tolist() if with_outcomes else None
        )


@pytest.mark.parametrize(
    "text", ["", "{}", '{"request_id": 1, "confidences": [0.5]}\n{"request_id": 1}', "no json"]
)
def test_broken_records_are_refused(tmp_path, text):
    (tmp_path / "record.jsonl").write_text(text)
    with pytest.raises(ValueError, match="isn't a record of confidences"):
        load_recorded(tmp_path / "record.jsonl")
