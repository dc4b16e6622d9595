"""Whatever a client sends, it gets an answer in OpenAI's shape that is not the server's fault."""

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.serving.api import body as body_module
from dspark_jax.serving.api.app import create_app
from dspark_jax.serving.intake import EngineUnavailable
from tests.serving.clients import client_of, http_client, openai_client
from tests.serving.fake_engine import MODEL, FakeEngine, make_backend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def bodies(path):
    return {"prompt": "ab"} if path == COMPLETIONS else {"messages": USER}


async def post(path, body, *, engine=None, **options):
    async with http_client(make_backend(engine or FakeEngine())) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, **options)


def check_error(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert param is None or error["param"] == param, error
    assert code is None or error["code"] == code, error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(9))}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"made_up": 1}, "made_up"),
        ({"guided_json": {}}, "guided_json"),
        ({"model": 5}, "model"),
    ],
)
async def test_bad_values_name_the_field(path, fields, param):
    engine = FakeEngine()
    check_error(await post(path, bodies(path) | fields, engine=engine), 400, param)
    assert engine.requests == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "name",
    [
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "response_format",
    ],
)
async def test_structured_output_is_refused_by_name_and_null_is_nothing(path, name):
    reply = await post(path, bodies(path) | {name: {"type": "json_object"}})
    check_error(reply, 400, name, "unsupported_parameter")
    assert "not constrained" in reply.json()["error"]["message"]
    assert (await post(path, bodies(path) | {name: None, "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [[1], [512]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [5] * 256}, "prompt"),
        ({"prompt": "long " * 1000}, "prompt"),
        ({"prompt": ["a"] * 2000, "n": 100}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": "no"}, "echo"),
        ({"messages": USER}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_bad_completions_name_the_field(fields, param):
    check_error(await post(COMPLETIONS, {"prompt": "ab"} | fields), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "mood": "x"}]}, "messages.0.mood"),
        ({"messages": [{"role": "developer", "content": ""}]}, "messages"),
        ({"messages": [*USER, {"role": "assistant", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 1000}]}, "messages"),
        ({"max_completion_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"thinkin": True}}, "chat_template_kwargs.thinkin"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 1}, "best_of"),
    ],
)
async def test_bad_chats_name_the_field(fields, param):
    check_error(await post(CHAT, {"messages": USER} | fields), 400, param)


async def test_an_image_is_refused_by_its_place():
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    response = await post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    check_error(response, 400)
    assert response.json()["error"]["param"].startswith("messages.0.content")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe{}", b'{"prompt": "\\ud800"}', b"[" * 5000,
     b'{"prompt": "\xff"}', b'{"n": 1e999}', b"\x00"],
)  # fmt: skip
async def test_bodies_that_are_no_json_object(path, body):
    check_error(await post(path, body), 400)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_harmless_fields_and_nulls_are_accepted(path):
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    nulls = dict.fromkeys(
        ["temperature", "stop", "seed", "n", "max_tokens", "logit_bias", "stream", "logprobs"]
    )
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await post(path, bodies(path) | harmless | nulls, headers=headers)
    assert response.status_code == 200, response.text


async def test_unknown_model_url_and_method():
    check_error(await post(COMPLETIONS, {"prompt": "a", "model": "gpt"}), 404, "model")
    async with http_client(make_backend(FakeEngine())) as client:
        check_error(await client.get("/v1/models/gpt"), 404, "model", "model_not_found")
        check_error(await client.get("/v2/nothing"), 404)
        check_error(await client.get(COMPLETIONS), 405)
        check_error(await client.post("/v1/models"), 405)
        assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL


async def test_the_context_limit_has_its_own_code():
    code = "context_length_exceeded"
    check_error(await post(COMPLETIONS, {"prompt": [5] * 256}), 400, "prompt", code)
    check_error(await post(COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 7}), 400, code=code)
    assert (await post(COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 6})).status_code == 200
    assert (await post(COMPLETIONS, {"prompt": [5] * 255})).status_code == 200


async def test_a_large_body_is_refused(monkeypatch):
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 100)
    check_error(await post(COMPLETIONS, {"prompt": "a" * 100}), 413)


async def test_the_key_guards_v1_only():
    backend = make_backend(FakeEngine())
    async with http_client(backend, api_key="secret") as client:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "secret"}):
            check_error(await client.get("/v1/models", headers=headers), 401)
            check_error(await client.post(CHAT, content=b"{", headers=headers), 401)
        wrong = {"Authorization": b"Bearer \xff"}
        check_error(await client.get("/v1/models", headers=wrong), 401)
        assert (await client.get("/health")).status_code == 200
    async with openai_client(backend, api_key="secret") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_new_requests_while_draining_or_failed_or_full(stream):
    body = {"prompt": "a", "stream": stream}
    engine = FakeEngine()
    engine.refusal = EngineUnavailable("4096 requests are open")
    check_error(await post(COMPLETIONS, body, engine=engine), 503)
    engine.refusal = ValueError("pages are too few")
    check_error(await post(COMPLETIONS, body, engine=engine), 400)
    engine = FakeEngine()
    engine.is_draining = True
    response = await post(COMPLETIONS, body, engine=engine)
    check_error(response, 503)
    assert response.headers["retry-after"]
    async with http_client(make_backend(engine)) as client:
        assert (await client.get("/health")).status_code == 200
        engine.is_healthy = False
        check_error(await client.get("/health"), 503)


async def test_the_client_library_raises_what_it_should():
    async with openai_client(make_backend(FakeEngine())) as client:
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert caught.value.param == "temperature"


FIELD_NAMES = st.sampled_from(
    ["prompt", "messages", "model", "n", "max_tokens", "max_completion_tokens", "temperature",
     "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs",
     "echo", "stream", "stream_options", "tools", "tool_choice", "min_tokens", "ignore_eos",
     "response_format", "reasoning_effort", "chat_template_kwargs", "best_of", "suffix", "user",
     "logit_bias", "repetition_penalty", "add_special_tokens", "skip_special_tokens", "extra"]
)  # fmt: skip
KEYS = st.sampled_from(
    ["role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "thinking",
     "include_usage", "task", "reasoning"]
)  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "function", "text", "auto", "{}", MODEL, "max"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4)
)


FUZZED_ENGINE = FakeEngine("x")
FUZZED_APP = create_app(make_backend(FUZZED_ENGINE))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@given(fields=st.dictionaries(FIELD_NAMES, VALUES, max_size=5), keeps=st.booleans())
@settings(max_examples=100, deadline=None)
async def test_no_input_is_answered_with_a_server_error(path, fields, keeps):
    FUZZED_ENGINE.requests.clear()
    body = bodies(path) | fields if keeps else fields
    async with client_of(FUZZED_APP) as client:
        response = await client.post(path, content=json.dumps(body).encode())
    if response.status_code == 200:
        assert '"error"' not in response.text
    else:
        assert response.status_code in (400, 404), response.text
        check_error(response, response.status_code)
        assert FUZZED_ENGINE.requests == []
    assert FUZZED_ENGINE.num_running == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@given(noise=st.binary(max_size=60), position=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
async def test_no_bytes_are_answered_with_a_server_error(path, noise, position):
    good = json.dumps(bodies(path)).encode()
    async with client_of(FUZZED_APP) as client:
        response = await client.post(path, content=good[:position] + noise + good[position:])
    assert response.status_code in (200, 400, 404)
