"""One request: what is timed, what is counted, what counts as failed."""

import json

import pytest

from dspark_jax.serving.bench.client import (
    CompletionClient,
    RequestRecord,
    StreamError,
    TokenStream,
)
from dspark_jax.serving.bench.dataset import Prompt
from dspark_jax.serving.bench.http import ConnectionPool

from .fake_server import PIECES, PROMPT_TOKENS, FakeServer

OUTPUT_TOKENS = 10  # one token in the first chunk, three in each of the other three


class Clock:
    """Time that moves only when told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _feed(events: list[tuple[float, dict]], *, start_s: float = 100.0) -> RequestRecord:
    """A record after events at given times; usage of 10 tokens follows."""
    clock, record = Clock(), RequestRecord(start_s=start_s)
    stream = TokenStream(record, clock)
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": OUTPUT_TOKENS}}
    for now_s, event in [*events, (999.0, usage)]:
        clock.now_s = now_s
        stream.feed(200, b"data: " + json.dumps(event).encode() + b"\r\n\r\n")
    stream.feed(200, b"data: [DONE]\n\n")
    stream.finish(200)
    return record


def _text(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"text": text, "finish_reason": finish}]}


def _delta(finish: str | None = None, **delta: str | None) -> dict:
    return {"choices": [{"delta": delta, "finish_reason": finish}]}


def test_times_of_a_completion():
    record = _feed([(100.5, _text("a")), (100.75, _text("bcd")), (101.75, _text("e", "length"))])
    assert record.ttft_s == 0.5
    assert record.itl_s == [0.25, 1.0]
    assert record.latency_s == 1.75
    assert record.tpot_s == pytest.approx(1.25 / 9)
    assert record.text == "abcde"
    assert (record.prompt_tokens, record.output_tokens) == (3, 10)


def test_chat_role_is_not_a_token_and_reasoning_is():
    record = _feed(
        [
            (100.1, _delta(role="assistant", content="")),
            (100.5, _delta(role="assistant", reasoning_content="hm")),
            (101.0, _delta(content="yes")),
            (101.5, _delta("stop")),
        ]
    )
    assert record.ttft_s == 0.5
    assert record.itl_s == [0.5]
    assert record.latency_s == 1.5
    assert record.text == "hmyes"


def test_chunk_without_text_is_a_gap_unless_it_only_ends():
    held_back = _feed([(101.0, _text("a")), (102.0, _text("")), (103.0, _text("", "stop"))])
    assert held_back.itl_s == [1.0]
    assert held_back.latency_s == 3.0


def test_only_token_is_the_end():
    record = _feed([(100.25, _text("", "stop"))])
    assert (record.ttft_s, record.latency_s, record.itl_s) == (0.25, 0.25, [])


def test_one_token_has_no_time_per_token():
    assert RequestRecord(output_tokens=1, ttft_s=1.0, latency_s=1.0).tpot_s is None


@pytest.mark.parametrize("event", [b"[1]", b'{"choices": 3}', b'{"usage": {"a": 1}}', b"{oops"])
def test_events_of_another_shape_are_errors(event):
    with pytest.raises(StreamError, match="not a completion event"):
        TokenStream(RequestRecord()).feed(200, b"data: " + event + b"\n")


async def _complete(prompt, backend="openai", *, split=1 << 20, timeout_s=60.0, body=None):
    async with FakeServer(split=split) as server:
        pool = ConnectionPool(server.url)
        endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
        client = CompletionClient(
            pool=pool, backend=backend, endpoint=endpoint, model="m", timeout_s=timeout_s,
            body=body or {},
        )  # fmt: skip
        record = await client.complete(Prompt(prompt, 32))
        pool.close()
        return record, server


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize("split", [1, 3, 1 << 20])
async def test_text_survives_any_cut_of_the_network(backend, split):
    record, _ = await _complete("ok", backend, split=split)
    assert record.error == ""
    assert record.text == "".join(PIECES)
    assert len(record.itl_s) == len(PIECES) - 1
    assert (record.prompt_tokens, record.output_tokens) == (PROMPT_TOKENS, OUTPUT_TOKENS)
    assert record.latency_s == pytest.approx(record.ttft_s + sum(record.itl_s))


async def test_request_bodies():
    _, server = await _complete([4, 5], body={"temperature": 0.5, "model": "mine"})
    assert server.bodies == [
        {
            "model": "mine", "stream": True, "prompt": [4, 5], "max_tokens": 32,
            "stream_options": {"include_usage": True}, "temperature": 0.5,
        }
    ]  # fmt: skip
    _, server = await _complete("hi", "openai-chat")
    assert server.bodies == [
        {
            "model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 32, "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("http 400", "HTTP 400: prompt is too long"),
        ("refuse", "connection lost before a response: closed"),
        ("cut", "connection lost in the middle of the response: closed"),
        ("error event", "error event: non-finite logits"),
        ("bad event", "not a completion event: b'{oops'"),
        ("no usage", "the stream carried no usage (stream_options.include_usage ignored?)"),
        ("silent", "the stream carried no output"),
        ("stall", "timeout after 0.3 s"),
    ],
)
async def test_failures_carry_their_reason(prompt, reason):
    record, _ = await _complete(prompt, timeout_s=0.3 if prompt == "stall" else 60.0)
    assert record.error == reason


async def test_unreachable_server_is_a_failure():
    async with FakeServer() as server:
        url = server.url
    client = CompletionClient(
        pool=ConnectionPool(url), backend="openai", endpoint="/v1/completions", model="m"
    )
    assert "Connect call failed" in (await client.complete(Prompt("ok", 1))).error


async def test_chat_refuses_token_ids():
    with pytest.raises(ValueError, match="--backend openai"):
        await _complete([1, 2], "openai-chat")
