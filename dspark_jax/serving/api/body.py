"""Reading request bodies: size, JSON, schema."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from dspark_jax.serving.api.errors import ApiError, error_of_validation

MAX_BODY_BYTES = 32 * 2**20
_Body = TypeVar("_Body", bound=BaseModel)


async def read_body(request: Request, schema: type[_Body]) -> _Body:
    """The body as a `schema`, whatever its content type.

    Raises `ApiError`: 413 beyond `MAX_BODY_BYTES`, 400 for anything that is not valid, 499 when the
    client went away before its end.
    """
    try:
        return schema.model_validate_json(await _read(request))
    except ValidationError as error:
        raise error_of_validation(error) from error
    except ClientDisconnect as error:
        raise ApiError("The client went away.", status=499) from error


async def _read(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            message = f"The body exceeds {MAX_BODY_BYTES} bytes."
            raise ApiError(message, status=413, code="request_too_large")
        chunks.append(chunk)
    return b"".join(chunks)
