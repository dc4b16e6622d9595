"""A server without a tokenizer takes ids and answers with numbers."""

from __future__ import annotations

import dataclasses

import pytest

from dspark_jax.serving.api.app import create_app
from dspark_jax.serving.tokenizer import IdTokenizer
from tests.serving.clients import client_of
from tests.serving.fake_engine import FakeEngine, make_backend


@pytest.fixture
def backend():
    engine = FakeEngine()
    return dataclasses.replace(make_backend(engine), tokenizer=IdTokenizer())


async def test_token_ids_in_numbers_out(backend):
    async with client_of(create_app(backend)) as client:
        answer = await client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 8})
        assert answer.status_code == 200
        numbers = [int(word) for word in answer.json()["choices"][0]["text"].split()]
        assert numbers == list(backend.engine.reply_ids)[:8]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "text"}]}),
    ],
)
async def test_text_is_refused_with_the_remedy(backend, path, body):
    async with client_of(create_app(backend)) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert "send token ids to /v1/completions" in answer.json()["error"]["message"]
