"""The names of `easydel.trainers`."""

from groupax.compat.easydel.config import GRPOConfig as GRPOConfig
from groupax.compat.easydel.trainer import GRPOTrainer as GRPOTrainer
