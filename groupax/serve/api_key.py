"""The check of the key that a request must have. Imports no jax."""

import hmac
from collections.abc import Iterable, Mapping

from groupax.serve.errors import ApiError


def check_key(headers: Mapping[str, str], keys: Iterable[str]) -> None:
    """Checks that a request has one of these keys, where clients of OpenAI or of Anthropic send theirs.

    Raises:
        ApiError: It has none of them.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    given = (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
    if not given or not any(hmac.compare_digest(given, each.encode()) for each in keys):
        message = "the API key is missing or wrong; send 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
