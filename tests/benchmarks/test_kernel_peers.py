"""What the kernel benchmark gives its peers: rows, places, argument orders, with stand-ins for the binaries."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.kernel_peers import deep_gemm, flash_mla
from benchmarks.kernel_peers.__main__ import main as measure_kernel
from benchmarks.kernel_peers.call import PeerCall, PeerCase, measure, relative_error
from benchmarks.kernel_peers.flash_mla import Step
from benchmarks.kernel_peers.load import PeerMissing, load_deep_gemm, load_flash_mla
from benchmarks.kernel_peers.v4_rows import pack_pages, read_rows
from benchmarks.kernel_targets import TARGETS
from benchmarks.peer_times import KERNELS, add_times, measure_peers, read_lines

STEP = Step(tokens=5, heads=4, listed=16, per_request=3, pool=128, layers=2)

# As the binary of vllm 0.26.0 declares them.
DECODE_SCHEMA = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale, Tensor(c!)? out_) "
    "-> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)
SPARSE_SCHEMA = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
    "Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]"
)


def e4m3(byte: int) -> float:
    """A byte's value: sign, four bits of exponent with bias 7, three of fraction."""
    sign, exponent, fraction = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3(byte) for byte in range(256)])


def unpack(packed: torch.Tensor, place: int) -> np.ndarray:
    """One row, byte by byte from the storage."""
    pages, per_page = packed.shape[:2]
    memory = torch.as_strided(packed, (pages * packed.stride(0),), (1,)).numpy()
    page, row = divmod(place, per_page)
    data = memory[page * packed.stride(0) + row * 576 :][:576]
    scales = memory[page * packed.stride(0) + per_page * 576 + row * 8 :][:8]
    assert scales[7] == 0
    plain = E4M3[data[:448]] * np.repeat(2.0 ** (scales[:7].astype(float) - 127), 64)
    high = data[448:].view(np.uint16).astype(np.uint32) << 16
    return np.concatenate([plain, high.view(np.float32)])


def random_rows() -> torch.Tensor:
    """Rows of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 5, 512, generator=generator)
    rows *= torch.exp2(torch.randint(-9, 9, (3, 5, 1), generator=generator))
    rows[1, 2] = 0
    return rows


def test_packed_rows_hold_their_values():
    rows = random_rows()
    packed = pack_pages(rows)
    assert packed.shape == (3, 5, 1, 584)
    assert packed.stride(0) % 576 == 0
    assert packed.stride()[1:] == (584, 584, 1)
    for place, row in enumerate(rows.flatten(0, 1).numpy()):
        actual = unpack(packed, place)
        blocks = np.abs(row[:448]).reshape(7, 64).max(axis=1)
        # Half a step of three fraction bits, or of the smallest exponent in a block of larger values.
        step = np.maximum(np.abs(row[:448]) / 16, np.repeat(blocks, 64) * 2.0**-15 + 1e-9)
        assert (np.abs(actual[:448] - row[:448]) <= step).all()
        np.testing.assert_array_equal(actual[448:], torch.tensor(row[448:]).bfloat16().float())


def test_rows_are_read_as_they_are_packed():
    packed = pack_pages(random_rows())
    places = torch.tensor([14, 0, 7, 7])
    expected = np.stack([unpack(packed, place) for place in places.tolist()])
    np.testing.assert_array_equal(read_rows(packed, places).numpy(), expected)


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="576"):
        pack_pages(torch.zeros(1, 2, 576))


def test_windows_end_with_the_token_and_stay_in_their_request():
    places = flash_mla.window_places(STEP)
    assert STEP.window_rows == 192
    assert STEP.requests == 2
    assert places[:, 0].tolist() == [1, 2, 3, 193, 194]
    assert places[:, -1].tolist() == [128, 129, 130, 320, 321]


def attention_by_hand(q, rows, sink):
    """[H, 512] of q [H, 512] in float64, head by head."""
    out = []
    for head, extra in zip(q.double().numpy(), sink.double().numpy()):
        weights = np.exp(rows @ head / np.sqrt(512))
        out.append(weights @ rows / (weights.sum() + np.exp(extra)))
    return np.stack(out)


@pytest.fixture(scope="module")
def ops():
    """The two operators with the binary's signatures, computed by hand from the bytes."""

    def decode(q, kv, indices, length, sink, plan, splits, extra_kv, extra, extra_length, *rest):
        assert rest == (512, 512**-0.5, None)
        assert (plan is None) == (splits is None)
        assert all(x.dtype == torch.int32 for x in (indices, extra, length, extra_length))
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        for token in range(len(q)):
            assert length[token] == indices.shape[2]
            assert extra_length[token] == extra.shape[2]
            places = (kv, indices[token, 0]), (extra_kv, extra[token, 0])
            rows = np.stack([unpack(pages, place) for pages, at in places for place in at.tolist()])
            out[token, 0] = torch.tensor(attention_by_hand(q[token, 0], rows, sink))
        return out, torch.zeros(1), torch.zeros(2), torch.zeros(3)

    def sparse(q, kv, indices, scale, width, sink, length, out):
        assert (scale, width, out) == (512**-0.5, 512, None)
        assert indices.dtype == length.dtype == torch.int32
        result = torch.empty(q.shape, dtype=torch.bfloat16)
        for token in range(len(q)):
            assert length[token] == indices.shape[2]
            rows = kv[indices[token, 0].long(), 0].double().numpy()
            result[token] = torch.tensor(attention_by_hand(q[token], rows, sink))
        return [result]

    library = torch.library.Library("stand_in_flash_mla", "DEF")
    for schema, function in ((DECODE_SCHEMA, decode), (SPARSE_SCHEMA, sparse)):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")
    yield torch.ops.stand_in_flash_mla
    library._destroy()


@pytest.mark.parametrize("build", [flash_mla.decode_call, flash_mla.sparse_call])
def test_flash_mla_gets_what_its_check_expects(ops, build):
    call = build(ops, STEP, "cpu")
    assert call.check() < 1e-2
    assert torch.isfinite(call.run(3)[0]).all()


def test_places_are_of_the_pool():
    made = flash_mla.sparse_arguments(STEP, "cpu")
    assert made.places.shape == (5, 1, 144)
    assert made.places.is_contiguous()
    assert made.places[:, :, :128].min() == STEP.pool + 1
    assert made.places.max() < len(made.pools[0])
    assert made.places[:, :, 128:].max() < STEP.pool


class DeepGemm:
    """The functions used, by float32 arithmetic, for the layouts that they ask for."""

    def fp8_fp4_mqa_logits(self, q, keys, weights, starts, ends, *, clean_logits):
        codes, scales = keys
        assert not clean_logits
        assert q[1] is None
        assert starts.dtype == ends.dtype == torch.int32
        assert (starts == 0).all()
        assert (ends == len(codes)).all()
        dots = torch.einsum("thd,nd->thn", q[0].float(), codes.float()) * scales
        return torch.einsum("thn,th->tn", dots.relu(), weights)

    def fp8_gemm_nt(self, x, weight, out):
        assert out.dtype == torch.bfloat16
        assert x[1].stride() == (1, len(x[0]))
        out.copy_(values(*x, 1) @ values(*weight, 128).T)

    def fp8_einsum(self, equation, x, weight, out, *, recipe):
        assert (equation, recipe) == ("bhr,hdr->bhd", (1, 128, 128))
        assert x[0].permute(1, 0, 2).is_contiguous()
        assert x[1].shape == (*x[0].shape[:2], x[0].shape[2] // 128)
        assert x[1].permute(1, 2, 0).is_contiguous()
        out.copy_(torch.einsum(equation, values(*x, 1), values(*weight, 128)))

    def m_grouped_fp8_gemm_nt_masked(self, x, weight, out, masked, expected):
        assert masked.dtype == torch.int32
        assert x[0].shape[1] >= masked.max()
        assert x[1].transpose(1, 2).is_contiguous()
        assert expected == -(-int(masked.sum()) // len(masked))
        out.fill_(float("nan"))
        product = values(*x, 1) @ values(*weight, 128).transpose(1, 2)
        for expert, rows in enumerate(masked.tolist()):
            out[expert, :rows] = product[expert, :rows]


def values(codes, scales, rows):
    """Codes times their scales, one per 128 columns and `rows` rows."""
    by_row = torch.arange(codes.shape[-2]) // rows
    return codes.float() * scales[..., by_row, :][..., torch.arange(codes.shape[-1]) // 128]


@pytest.mark.parametrize("with_topk", [False, True])
def test_scores_are_what_their_check_expects(with_topk):
    call = deep_gemm.scores_call(DeepGemm(), 6, 1024, with_topk=with_topk, device="cpu")
    assert call.check() < 1e-5
    out = call.run(5)
    assert out[1].shape == (6, 512) if with_topk else out.shape == (6, 1024)


def test_linears_are_what_their_check_expects(monkeypatch):
    sizes = {"plain": (256, 384, 1), "grouped": (128, 256, 3)}
    monkeypatch.setattr(deep_gemm, "LINEARS", sizes)
    call = deep_gemm.linear_call(DeepGemm(), 8, device="cpu")
    call.run(1)
    assert call.check() < 1e-2


def test_masked_products_are_what_their_check_expects(monkeypatch):
    monkeypatch.setattr(deep_gemm, "EXPERTS", {"experts": 3, "model": 256, "width": 128})
    ids = np.array([[0, 2], [2, 0], [2, 2]])
    monkeypatch.setattr(deep_gemm, "routing", lambda tokens: {"expert_ids": ids})
    call = deep_gemm.masked_call(DeepGemm(), 3, device="cpu")
    call.run(0)
    assert call.check() < 1e-2


def test_targets_name_peers_and_cases_that_are_measured():
    measured = {flash_mla.DECODE: flash_mla.STEPS, flash_mla.SPARSE: flash_mla.STEPS}
    measured |= {deep_gemm.SCORES_TOPK: deep_gemm.SCORE_SIZES}
    wanted = [
        # fp8 rows are compared with what stands beside plain ones.
        (target.figure.name.removesuffix(" / ours"), target.case.removesuffix(" fp8 rows"))
        for target in TARGETS
        if target.kernel in KERNELS and target.figure.name.endswith(" / ours")
    ]
    assert len(wanted) == 19
    for peer, case in wanted:
        assert case in measured[peer]


@pytest.mark.parametrize("load", [load_flash_mla, load_deep_gemm])
def test_missing_binaries_are_told_in_one_line(load, tmp_path):
    with pytest.raises(PeerMissing, match=r"peers_pack\.sh") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_folder_is_told_in_one_line(tmp_path, capsys):
    assert measure_peers("linear", tmp_path / "none", 1.0) == []
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert f"no folder {tmp_path / 'none'}" in text


def test_a_machine_without_a_gpu_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["linear", "--peers", str(tmp_path), "--output", str(tmp_path / "times")]
    assert measure_kernel(command) == 1
    assert capsys.readouterr().err == "peers of linear: torch sees no GPU\n"


def test_a_failing_peer_is_one_line_of_its_result():
    def fail() -> PeerCall:
        raise RuntimeError("two\nlines")

    def wrong() -> PeerCall:
        return PeerCall(run=lambda i: i, check=lambda: float("nan"), limit=0.1, expected_ms=1.0)

    failed = measure(PeerCase("linear", "fp8 64 tokens", "peer", fail))
    assert failed["failure"] == "RuntimeError: two lines"
    assert "exceeds" in measure(PeerCase("linear", "fp8 64 tokens", "peer", wrong))["failure"]


def test_an_infinite_output_is_an_infinite_error():
    good = torch.ones(3)
    assert relative_error(good, good) == 0
    assert relative_error(torch.tensor([1, float("nan"), 1]), good) == float("inf")


def test_times_go_to_the_results_they_belong_to():
    results = [
        {"kernel": "linear", "case": "fp8 640 tokens", "ms": 5.0, "peers_ms": {}},
        {"kernel": "linear", "case": "fp8 64 tokens, all", "ms": 2.0, "peers_ms": {"XLA": 4.0}},
    ]
    time = {"kernel": "linear", "case": "fp8 64 tokens", "name": "peer", "ms": 3.0, "error": 0.0}
    failure = {"kernel": "linear", "case": "fp8 64 tokens", "name": "other", "failure": "no"}
    text = "".join(json.dumps(line) + "\n" for line in (time, failure)) + '{"kernel": "lin'
    lines = add_times(results, read_lines(text))
    assert results[0]["peers_ms"] == {}
    assert results[1]["peers_ms"] == {"XLA": 4.0, "peer": 3.0}
    assert "peer 3 (1.50x)" in lines[0]
    assert "other did not run: no" in lines[1]
    assert len(lines) == 2
