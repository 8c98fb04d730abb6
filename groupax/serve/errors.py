"""What a client is told when its request cannot be done, as OpenAI's servers tell it. Imports nothing of ours."""

from typing import Any


class ApiError(Exception):
    """A request that is refused or cannot be finished.

    Args:
        status: of HTTP.
        message: what is wrong, the values, what to do.
        param: the field of the request.
        code: for programs, as "model_not_found".
        headers: of the response.
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
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = self.message.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


# Types of errors that are neither the request's fault nor the server's.
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
