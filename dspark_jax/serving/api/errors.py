"""Errors in OpenAI's shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

_RETRY_AFTER_S = "5"
_PYDANTIC_NAMES = frozenset({"str", "int", "float", "bool", "TextPart", "Message"})
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that is answered with an error. `param` names the field at fault."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP response that the client gets."""
        headers = {"Retry-After": _RETRY_AFTER_S} if self.status == 503 else None
        return JSONResponse(self.body(), self.status, headers)


def unavailable(message: str) -> ApiError:
    """503: try again later, or elsewhere."""
    return ApiError(message, status=503, code="service_unavailable")


def error_of_validation(error: ValidationError) -> ApiError:
    """The first complaint of pydantic as an `ApiError` that names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    # Locations within a union name the alternative that was tried; clients know fields and indices.
    param = ".".join(str(part) for part in first["loc"] if _is_client_name(part)) or None
    kind, message = first["type"], first["msg"]
    param = param or first.get("ctx", {}).get("param")
    if kind == "json_invalid":
        return ApiError(
            f"The body is not valid JSON: {first.get('ctx', {}).get('error', message)}",
            code="invalid_json",
        )
    if kind == "extra_forbidden":
        return ApiError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        return ApiError(message, param=param, code="missing_required_parameter")
    if kind == "unsupported":
        return ApiError(message, param=param, code="unsupported_parameter")
    where = f"Invalid value for '{param}': " if param else ""
    return ApiError(where + message, param=param, code="invalid_value")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure of a request in OpenAI's shape, unknown URLs and methods included."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        what = HTTPStatus(error.status_code).phrase
        message = f"{what}: {request.method} {request.url.path}"
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        body = ApiError(message, status=error.status_code, code=code).body()
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises it again afterwards, so the server's log has the traceback.
        return internal_error().response()


def internal_error() -> ApiError:
    """500 for what is not the client's fault; details belong in the log."""
    return ApiError("The server failed to answer.", status=500, code="internal_error")


def _is_client_name(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in _PYDANTIC_NAMES)
