"""Errors in the format of OpenAI's API. Imports nothing of groupax."""

from typing import Any

# Types of errors that are neither the request's fault nor the server's.
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """A request that is refused or cannot be finished.

    Args:
        status: HTTP status.
        message: What is wrong, the values, and what to do.
        param: Name of the request's field.
        code: Machine-readable cause, as "model_not_found".
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = self.message.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def stopping() -> ApiError:
    """Returns the error of a request that a stopping server does not begin."""
    return ApiError(503, "the server is stopping", code="stopping")
