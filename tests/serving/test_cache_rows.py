"""A server of the bundled model with `--kv-cache-dtype fp8` says what one with rounded bfloat16 rows says."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dspark_jax.kernels.rows import Fp8Keys, Fp8Rows, RoundedRows
from dspark_jax.serving.config import parse_flags
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.executor import Executor
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.request import TokenLogprob
from dspark_jax.serving.tokenizer import TextTokenizer
from tests.serving.engine.harness import collect, make_request

BUNDLED = Path(str(resources.files("dspark_jax") / "bundled"))
PROMPT = '"""Tests for \'site\'.\n\nTests assume the initial paths in sys.path once the interpreter has begun\n'
NUM_TOKENS = 48
NEAR_TIE = 0.25
"""Programs that differ may round bfloat16 differently: closer tokens than this, in nats, may change places."""


def prompt_ids() -> tuple[int, ...]:
    tokenizer = TextTokenizer.from_folder(BUNDLED, bos_token_id=0)
    return tuple(tokenizer.encode(PROMPT, add_special_tokens=True))


async def greedy(cache_rows: str, folder: Path) -> tuple[list[TokenLogprob], Executor]:
    """What a server of bfloat16 arithmetic answers to the prompt, and what answered."""
    config = parse_flags(
        [
            "--dtype", "bfloat16", "--kv-cache-dtype", cache_rows, "--max-num-seqs", "1", "--max-model-len", "256",
            "--max-num-batched-tokens", "16", "--compilation-config", '{"cudagraph_capture_sizes": [16]}',
            "--compilation-cache-dir", str(folder),
        ]
    )  # fmt: skip
    engine = Engine.from_config(config, Metrics(cache_rows))
    engine.start()
    try:
        sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 2}
        request = make_request(prompt=prompt_ids(), **sampling)
        outcome = await collect(engine, request)
    finally:
        engine.shutdown(drain=False)
    assert engine.failure is None
    executor = engine.executor
    assert isinstance(executor, Executor)
    return [token for chunk in outcome.chunks for token in chunk.logprobs or ()], executor


async def test_greedy_text_over_fp8_rows_is_that_over_rounded_rows(tmp_path: Path) -> None:
    rounded, rounded_by = await greedy("auto", tmp_path)
    packed, packed_by = await greedy("fp8", tmp_path)
    assert isinstance(rounded_by.state.cache.window, RoundedRows)
    assert isinstance(packed_by.state.cache.window, Fp8Rows)
    assert isinstance(packed_by.state.cache.index_keys, Fp8Keys)
    # The indexer has fewer entries than it picks, so its keys decide nothing.
    assert len(prompt_ids()) + NUM_TOKENS < 4 * rounded_by.model_config.index_topk
    assert len(rounded) == len(packed) == NUM_TOKENS
    for own, wanted in zip(packed, rounded):
        best, second = wanted.top.values()
        if own.token_id != wanted.token_id and best - second < NEAR_TIE:
            break  # two texts from here on
        assert own.token_id == wanted.token_id
        assert abs(own.logprob - wanted.logprob) < NEAR_TIE
