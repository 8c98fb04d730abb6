"""TRL's callback for a progress display. Imports no jax."""

from typing import Any

from groupax.compat.fields import warn


class RichProgressCallback:
    """A callback without effect: groupax has a progress display of its own, which `disable_tqdm` turns off."""

    def __init__(self, *_: Any, **__: Any) -> None:
        warn("RichProgressCallback changes nothing in groupax, which has a progress display of its own")
