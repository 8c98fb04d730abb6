"""The rollout engine: scheduler, cache, prefill, decoding and sampling."""
