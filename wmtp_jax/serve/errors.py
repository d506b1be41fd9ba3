"""Every failure as the OpenAI API has it, with the status that tells whose fault it is."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from wmtp_jax.engine.core import StepFailed
from wmtp_jax.engine.engine import EngineClosed, QueueFull
from wmtp_jax.errors import PromptTooLong, UserError
from wmtp_jax.serve.answers import ErrorBody, ErrorDetail
from wmtp_jax.text.constraints import GrammarFailed

_log = logging.getLogger(__name__)
_INVALID = "invalid_request_error"
# The engine's name for a field of a request, where it is another.
_FIELDS = {"constraint": "response_format", "max_new_tokens": "max_tokens"}
# What a field may be where it may be several things: the checks tell of each alone.
_UNIONS = {
    "prompt": "must be text, token ids, or a list of either, none of them empty",
    "stop": "must be text or a list of at most 16 texts, none of them empty",
    "content": 'must be text, or a list of parts such as {"type": "text", "text": ...}',
}


_FORMATS = ("text", "json_object", "json_schema", "regex")


class ApiError(Exception):
    """A failure with its status and body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    def response(self) -> JSONResponse:
        """As it is sent."""
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def api_error(error: Exception, prompt_field: str = "prompt") -> ApiError:
    """What a failure of the engine, or of a request's own making, is to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, f"{error}; try again later", kind="rate_limit_error", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosed):
        return ApiError(503, "the server is stopping", kind="server_error", headers={"Retry-After": "5"})
    if isinstance(error, StepFailed):
        return ApiError(500, f"{error}; the request is lost, a new one may succeed", kind="server_error")
    if isinstance(error, GrammarFailed):
        return ApiError(400, str(error), param="response_format")
    if isinstance(error, UserError):
        field = prompt_field if error.field is None else _FIELDS.get(error.field, error.field)
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        # The engine's names for what the API calls otherwise.
        return ApiError(400, str(error).replace("max_new_tokens", "max_tokens"), param=field, code=code)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}", kind="server_error")


def install(app: FastAPI) -> None:
    """Makes the application answer every failure this way."""

    @app.exception_handler(ApiError)
    async def _known(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        message = "the body cannot be read as JSON" if error.status_code == 400 else str(error.detail)
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, message, headers=headers).response()


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """The first error that says most, and the field that it is about."""
    worst = errors[0]
    place = [part for part in worst["loc"] if part != "body"]
    if worst["type"] == "json_invalid":
        reason = worst.get("ctx", {}).get("error", "not valid")
        return ApiError(400, f"the body is not JSON: {reason}")
    if not place and worst["type"] == "value_error":
        return ApiError(400, f"the body {worst['ctx']['error']}")
    if not place:
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    param = str(place[0])
    if param == "response_format" and len(place) > 1 and place[1] in _FORMATS:
        # Which of its forms it has, which is no place in it.
        del place[1]
    # Below the field come places within it and, for unions, names of their parts: only the former are for people.
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place[1:] if _is_place(part))
    union = next((_UNIONS[part] for part in place if part in _UNIONS), None)
    if union is not None:
        return ApiError(400, f"{param}: {union}" if param in _UNIONS else f"{param}{inner}: {union}", param=param)
    message = "unknown or not supported" if worst["type"] == "extra_forbidden" else _lower(worst["msg"])
    return ApiError(400, f"{param}{inner}: {message}", param=param)


def _is_place(part: Any) -> bool:
    return isinstance(part, int) or (re.fullmatch(r"[a-z_]+", str(part)) is not None and part not in ("str", "int"))


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
