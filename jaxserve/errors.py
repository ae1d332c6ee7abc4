"""The exceptions that jaxserve raises on purpose. Standard library only.

    JaxserveError
    |-- ConfigError            a flag, TOML key or model config that cannot be used
    |-- ModelLoadError         weights or tokenizer that cannot be loaded
    |-- RequestError           a request that cannot be served; carries an HTTP status
    |   |-- InvalidRequest     400: names the field
    |   |   `-- ContextExceeded      longer than the context, or than the KV pool
    |   |-- Unauthorized       401: no API key that is known here
    |   |-- Forbidden          403: the API key may not do this
    |   |-- ModelNotFound      404
    |   |-- NotFound           404: a file or batch that is not there for this caller
    |   |-- RequestTimeout     408: its time ran out before it was finished
    |   |-- Conflict           409: not possible in the state that a thing is in
    |   |-- TooLarge           413: a file that is larger than it may be
    |   |-- KeyReused          422: an idempotency key came back with another body
    |   |-- QueueFull          429: carries retry_after seconds
    |   |-- NotReady           503: still loading, or draining
    |   `-- StorageFailed      507: the server's disk is full or does not work
    |-- EngineError            the engine failed under a request that was fine; 500
    `-- OutputError            results that cannot be written; those written before are kept

Bad input raises from this tree; `assert` guards our own invariants.
"""

from __future__ import annotations


class JaxserveError(Exception):
    """Root of every exception raised on purpose."""


class ConfigError(JaxserveError):
    """A flag, TOML key or model config that cannot be used. The message says what to change."""


class ModelLoadError(JaxserveError):
    """Weights or a tokenizer that cannot be loaded. The message names the file."""


class RequestError(JaxserveError):
    """A request that cannot be served.

    Attributes:
        status: HTTP status that the server answers with.
        code: short machine-readable code, as the OpenAI error object has it.
        param: the request field at fault, or None.
    """

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field that is malformed, out of range, or not supported."""


class ContextExceeded(InvalidRequest):
    """A prompt, with the output that it asks for, that can never fit. Clients know the code, and shorten what they send.

    Args:
        max_context: tokens of the context. Some clients (litellm) know OpenAI's sentence about it instead of the code.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, max_context: int, param: str | None = None) -> None:
        super().__init__(f"{message}; this model's maximum context length is {max_context} tokens", param=param)


class Unauthorized(RequestError):
    """The request has no API key that this server knows."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The request's API key is known and may not do this."""

    status = 403
    code = "forbidden"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class NotFound(RequestError):
    """The request names a file or batch that is not there, or is not its caller's."""

    status = 404
    code = "not_found"


class RequestTimeout(RequestError):
    """The request's time, or the server's for any request, ran out before it was finished."""

    status = 408
    code = "timeout"


class Conflict(RequestError):
    """What the request asks for is not possible in the state that the thing is in."""

    status = 409
    code = "conflict"


class TooLarge(RequestError):
    """A file is larger than this server takes."""

    status = 413
    code = "file_too_large"


class KeyReused(RequestError):
    """A request came with the idempotency key of one that still runs, and another body."""

    status = 422
    code = "idempotency_key_reused"


class QueueFull(RequestError):
    """There is no room for the request now; the same one may be accepted later.

    Attributes:
        retry_after: seconds after which a retry is worth it.
        code: what is short: `queue_full` (the queue), `tenant_share` (the tenant's part of it), `too_late` (its first token
            would come after the time that the server holds itself to).
    """

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float, code: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code


class NotReady(RequestError):
    """The engine is still loading, or is draining."""

    status = 503
    code = "not_ready"


class StorageFailed(RequestError):
    """The server's disk is full or does not work; the request was fine."""

    status = 507
    code = "storage_failed"


class EngineError(JaxserveError):
    """The engine failed while serving a request that was fine."""


class OutputError(JaxserveError):
    """Results that cannot be written. The message names the file and says where those written before are."""
