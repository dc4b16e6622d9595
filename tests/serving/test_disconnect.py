"""A client that goes away, seen from below the web framework."""

import asyncio
import json

import pytest

from dspark_jax.serving.api.app import create_app
from tests.serving.fake_engine import FakeEngine, make_backend

PAUSE_S = 0.02


def scope_of(path):
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [], "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1", "scheme": "http",
    }  # fmt: skip


async def run_until_gone(path, body, leaves_after_steps):
    """Send a request, leave after some engine steps; the engine once the application returned."""
    engine = FakeEngine("word " * 40, chunk_len=1)
    engine.pause_s = PAUSE_S
    is_sent = False
    content = json.dumps(body).encode()

    async def receive():
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": content, "more_body": False}
        while engine.num_steps < leaves_after_steps:
            await asyncio.sleep(PAUSE_S / 10)
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    backend = make_backend(engine)
    await asyncio.wait_for(create_app(backend)(scope_of(path), receive, send), 10)
    return engine, backend, sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves_after_steps", [0, 1, 5])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
    ],
)
async def test_its_requests_are_aborted_within_two_steps(path, prompt, stream, leaves_after_steps):
    body = {**prompt, "stream": stream, "max_tokens": 100}
    engine, backend, _ = await run_until_gone(path, body, leaves_after_steps)
    assert engine.num_running == 0
    assert engine.num_aborted == len(engine.requests)
    # Two sequences; each may take two steps more.
    assert engine.num_steps <= leaves_after_steps + 4
    exposition = backend.metrics.render()[0].decode()
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    assert f"{aborted} {float(len(engine.requests))}" in exposition


async def test_a_client_that_stays_gets_everything():
    body = {"prompt": "a", "stream": True, "max_tokens": 10}
    engine, _, sent = await run_until_gone("/v1/completions", body, 10**6)
    assert engine.num_aborted == 0
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert sent[-2]["body"] == b"data: [DONE]\n\n"


async def test_a_body_that_breaks_off_reaches_no_engine():
    messages = [{"type": "http.request", "body": b'{"prompt"', "more_body": True}]
    messages.append({"type": "http.disconnect"})
    engine, sent = FakeEngine(), []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    await create_app(make_backend(engine))(scope_of("/v1/completions"), receive, send)
    assert sent[0]["status"] == 499
    assert engine.requests == []
