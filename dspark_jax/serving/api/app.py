"""The routes."""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import dspark_jax
from dspark_jax.serving.api.body import read_body
from dspark_jax.serving.api.chat_completions import plan_chat
from dspark_jax.serving.api.completions import plan_completion
from dspark_jax.serving.api.errors import ApiError, install_error_handlers, unavailable
from dspark_jax.serving.api.generation import Backend
from dspark_jax.serving.api.sampling import check_model
from dspark_jax.serving.api.schema import ChatBody, CompletionBody
from dspark_jax.serving.api.streaming import EventStream, respond_unless_disconnected

_REF = "#/components/schemas/{model}"


def create_app(backend: Backend, *, api_key: str | None = None) -> FastAPI:
    """The HTTP application. With `api_key` everything under `/v1` needs it as a bearer token."""
    app = FastAPI(title="dspark_jax", version=dspark_jax.__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    _add_generation_routes(app, backend)
    _add_model_routes(app, backend)
    _add_operation_routes(app, backend)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    if api_key is not None:
        app.add_middleware(_BearerKey, api_key=api_key)
    return app


def _add_generation_routes(app: FastAPI, backend: Backend) -> None:
    @app.post("/v1/completions", openapi_extra=_body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        body = await read_body(request, CompletionBody)
        backend.check_available()
        completion = await plan_completion(backend, body)
        if body.stream:
            return EventStream(completion.stream())
        return await respond_unless_disconnected(request, completion.answer())

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        body = await read_body(request, ChatBody)
        backend.check_available()
        completion = await plan_chat(backend, body)
        if body.stream:
            return EventStream(completion.stream())
        return await respond_unless_disconnected(request, completion.answer())


def _add_model_routes(app: FastAPI, backend: Backend) -> None:
    card = {
        "id": backend.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dspark_jax",
        "max_model_len": backend.engine.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served models: one."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One served model."""
        check_model(backend, name)
        return card


def _add_operation_routes(app: FastAPI, backend: Backend) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """200 while the engine works, 503 once it has failed."""
        if not backend.engine.is_healthy:
            raise unavailable("The engine has failed.")
        return {}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The package's version."""
        return {"version": dspark_jax.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus exposition."""
        text, content_type = backend.metrics.render()
        return Response(text, headers={"Content-Type": content_type})


class _BearerKey:
    """Answers 401 under `/v1` unless the key comes along."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_guarded = scope["type"] == "http" and scope["path"].startswith("/v1")
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if not is_guarded or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        error = ApiError("The API key is missing or wrong.", status=401, code="invalid_api_key")
        response = JSONResponse(error.body(), 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)


def _body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """The body's place in the OpenAPI document; routes read it themselves to answer every error."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies: Sequence[Any] = [(CompletionBody, "validation"), (ChatBody, "validation")]
    _, definitions = models_json_schema(bodies, ref_template=_REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    return document
