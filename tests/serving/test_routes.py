"""Routes besides the completions, and what requests leave in the metrics."""

import pytest

import dspark_jax
from tests.serving.clients import http_client
from tests.serving.fake_engine import MODEL, FakeEngine, make_backend


async def get(path, backend=None):
    async with http_client(backend or make_backend(FakeEngine())) as client:
        return await client.get(path)


async def test_models_health_and_version():
    (card,) = (await get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert (await get("/health")).json() == {}
    assert (await get("/version")).json() == {"version": dspark_jax.__version__}


async def test_openapi_describes_both_bodies():
    document = (await get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, name in [
        ("/v1/completions", "CompletionBody"),
        ("/v1/chat/completions", "ChatBody"),
    ]:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert {"temperature", "stop", "stream_options"} <= set(schemas[name]["properties"])

    def references(node):
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            node = list(node.values())
        if isinstance(node, list):
            for item in node:
                yield from references(item)

    for reference in references(document):
        assert reference.rsplit("/", 1)[-1] in schemas


async def test_requests_are_counted_and_timed():
    engine = FakeEngine("hello world", chunk_len=2)
    backend = make_backend(engine)
    async with http_client(backend) as client:
        stopped = {"prompt": "ab", "stop": "wor", "max_tokens": 50}
        usages = [
            (await client.post("/v1/completions", json=body)).json()["usage"]
            for body in (
                {"prompt": "ab", "max_tokens": 50},
                {"prompt": "ab", "max_tokens": 1},
                stopped,
            )
        ]
        engine.error = "broken"
        await client.post("/v1/completions", json=stopped)

    def value(name, **labels):
        labels = {"model_name": MODEL, "engine": "0", **labels}
        return backend.metrics.registry.get_sample_value(name, labels)

    assert value("vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    generated = value("vllm:generation_tokens_total")
    # The engine made the rest of the chunk in which the stop string ended, too.
    assert sum(u["completion_tokens"] for u in usages) <= generated
    assert generated <= sum(u["completion_tokens"] for u in usages) + 1
    finished = "vllm:request_success_total"
    assert value(finished, finished_reason="stop") == 2
    assert value(finished, finished_reason="length") == 1
    assert value(finished, finished_reason="error") == 1
    assert value(finished, finished_reason="abort") == 0
    assert value("vllm:time_to_first_token_seconds_count") == 3
    assert value("vllm:e2e_request_latency_seconds_count") == 4
    assert value("vllm:time_per_output_token_seconds_count") == 2
    assert value("vllm:inter_token_latency_seconds_count") > 0


@pytest.mark.parametrize("name", ["vllm:num_requests_running", "dspark:verification_budget"])
async def test_metrics_are_exposed(name):
    response = await get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert f"# HELP {name} " in response.text
