"""TRL's `RLOOConfig` and its translation to a native config."""

from dataclasses import dataclass, replace
from typing import Any

from groupax.compat.arguments import arguments
from groupax.compat.trl.batches import TRLSchedule
from groupax.compat.trl.config import Batches, GRPOConfig
from groupax.compat.trl.rloo_fields import ALIASES, INERT, REFUSED, RLOOFields
from groupax.compat.trl.run_settings import RunArguments

# What distinguishes RLOO from GRPO in TRL, apart from the advantages.
_OBJECTIVE: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence_sum",
    "scale_rewards": "none",
    "vllm_importance_sampling_correction": False,
}
_NORMALIZED = "groupax.objective.advantages:rloo(normalize=True)"


@arguments("TRL", INERT, REFUSED, ALIASES)
@dataclass
class RLOOConfig(RLOOFields, RunArguments):
    """TRL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    __repr__ = RunArguments.__repr__  # with what differs from the defaults only

    def as_grpo(self) -> GRPOConfig:
        """Returns the config of GRPO with the same batches, sampling, loss and optimizer."""
        own = self.FIELDS
        shared = own.defaults.keys() & GRPOConfig.FIELDS.defaults.keys() - own.inert.keys() - own.refused.keys()
        return GRPOConfig(**{name: getattr(self, name) for name in shared}, **_OBJECTIVE)

    def batches(self, num_devices: int = 1) -> Batches:
        """Resolves the batch settings for a number of devices.

        Raises:
            ValueError: The settings are inconsistent.
        """
        return self.as_grpo().batches(num_devices)

    def schedule(self, num_devices: int = 1) -> TRLSchedule:
        """Returns how rollouts become optimizer steps on this number of devices."""
        return self.as_grpo().schedule(num_devices)

    def to_native(self, num_devices: int = 1, num_prompts: int | None = None) -> Any:
        """Returns the native config.

        Args:
            num_devices: Number of devices that `per_device_train_batch_size` applies to.
            num_prompts: Number of prompts in the dataset; needed if evaluations or checkpoints happen every epoch.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        bounds = self.reward_clip_range
        return replace(
            self.as_grpo().to_native(num_devices, num_prompts),
            scale_rewards="group",  # which the estimator does not use
            advantage_estimator=_NORMALIZED if self.normalize_advantages else "rloo",
            use_kl_in_reward=self.beta != 0,
            reward_clip_range=tuple(bounds) if bounds else None,
        )
