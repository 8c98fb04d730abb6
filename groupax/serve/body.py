"""Bodies of requests."""

from starlette.requests import Request

from groupax.serve.errors import ApiError

MAX_DRAIN_RATIO = 16  # a body of up to this many times the limit is read, so that its sender gets a response


async def json_body(http: Request, limit: int) -> bytes:
    """Returns the body of a request in JSON.

    Raises:
        ApiError: its content type is another one, or it has more than `limit` bytes.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the content-type is {kind[:80]!a}; send 'content-type: application/json' "
        message += "(with curl: -H 'content-type: application/json')"
        raise ApiError(415, message, code="unsupported_media_type")
    length = http.headers.get("content-length", "")
    parts, size = [], 0
    if not length.isdecimal() or int(length) <= MAX_DRAIN_RATIO * limit:
        async for part in http.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > MAX_DRAIN_RATIO * limit:
                break
    else:
        size = int(length)
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes, which is the most that this server takes")
    return b"".join(parts)
