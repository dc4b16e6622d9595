"""Clients of an application in this process."""

from __future__ import annotations

import httpx
import openai
from starlette.types import ASGIApp

from dspark_jax.serving.api.app import create_app
from dspark_jax.serving.api.generation import Backend


def http_client(backend: Backend, *, api_key: str | None = None) -> httpx.AsyncClient:
    return client_of(create_app(backend, api_key=api_key))


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def openai_client(backend: Backend, *, api_key: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://server/v1",
        api_key=api_key or "none",
        http_client=http_client(backend, api_key=api_key),
        max_retries=0,
    )
