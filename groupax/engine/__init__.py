"""The rollout engine: scheduler, cache, decoding, sampling."""
