"""Settings of models that see images. Imports no jax."""

from dataclasses import dataclass

from groupax.settings.fields import ranged, setting


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """Training of the part of a model that sees images, and memory for images."""

    freeze_vision_tower: bool = setting(True, resume="fixed")
    """Keep the weights that see images, the vision tower and its projector, as they are. Each image is then encoded
    once for all rollouts and updates. Of an adapter, its target modules decide."""
    image_cache_gb: float = ranged(2.0, 1e6, resume="free")
    """Host memory in GB for the features of images, and as much again for prepared images. What does not fit is
    computed again."""
