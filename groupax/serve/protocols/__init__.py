"""Protocols of requests and responses: pure functions between their JSON and `serve.requests`, `serve.exchange`."""
