"""Features of images, computed once for each image and each set of weights."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from groupax.models.vision.batch import batch_images
from groupax.models.vision.config import VisionConfig
from groupax.models.vision.placement import num_features
from groupax.models.vision.tower import encode_images
from groupax.types import Image

MAX_SETS = 3  # of weights whose features are kept: the policy's, its reference's, and those of an older policy

_encode = jax.jit(encode_images, static_argnums=0)


class FeatureCache:
    """Features of the most recently used images in host memory.

    Each image is encoded on its own, so that its features depend on nothing but itself and the weights. A frozen tower
    encodes an image once for all rollouts and updates, as long as its features fit. Threads may share a cache.

    Args:
        config: The part of the model that sees images.
        max_bytes: Size of the features that are kept, in bytes.

    Attributes:
        num_bytes: Size of the stored features.
        num_encoded: Number of images that were encoded.
    """

    def __init__(self, config: VisionConfig, max_bytes: int) -> None:
        self.config, self.max_bytes = config, max_bytes
        self.num_bytes = self.num_encoded = 0
        self._sets: list[_Weights] = []  # the most recently used one last
        self._features: OrderedDict[tuple[int, str], np.ndarray] = OrderedDict()
        self._num_sets = 0
        self._lock = threading.Lock()

    def features(self, params: dict[str, Any], images: Sequence[Image]) -> list[Float[np.ndarray, "levels _ D"]]:
        """Returns the features of images, in their order.

        Args:
            params: Weights of the part that sees images, `params["vision"]` of the model's, replicated. The same arrays
                are the same weights.
            images: Images, which may be the same several times.
        """
        with self._lock:
            weights = self._set_of(params)
            found: dict[str, np.ndarray] = {}
            for image in images:
                if image.digest not in found:
                    found[image.digest] = self._find(weights, image)
            return [found[image.digest] for image in images]

    def _find(self, weights: "_Weights", image: Image) -> np.ndarray:
        key = weights.number, image.digest
        if key in self._features:
            self._features.move_to_end(key)
            return self._features[key]
        batch, [first] = batch_images(self.config, [image])
        features = _encode(self.config, weights.local, batch)
        own = np.asarray(features)[:, first : first + num_features(self.config, image)].copy()
        self.num_encoded += 1
        if own.nbytes <= self.max_bytes:
            self._features[key] = own
            self.num_bytes += own.nbytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._features.popitem(last=False)[1].nbytes
        return own

    def _set_of(self, params: dict[str, Any]) -> "_Weights":
        leaves = jax.tree.leaves(params)
        for index, known in enumerate(self._sets):
            if [*map(id, known.leaves)] == [*map(id, leaves)]:
                self._sets.append(self._sets.pop(index))
                return self._sets[-1]
        self._num_sets += 1
        self._sets.append(_Weights(self._num_sets, leaves, jax.tree.map(_local, params)))
        if len(self._sets) > MAX_SETS:
            dropped = self._sets.pop(0).number
            for key in [key for key in self._features if key[0] == dropped]:
                self.num_bytes -= self._features.pop(key).nbytes
        return self._sets[-1]


class _Weights:
    """A set of weights: its number, its arrays, which identify it, and a copy on one device of this process."""

    def __init__(self, number: int, leaves: list[Any], local: dict[str, Any]) -> None:
        self.number, self.leaves, self.local = number, leaves, local


def _local(weight: Any) -> Any:
    return weight.addressable_data(0) if isinstance(weight, jax.Array) else weight
