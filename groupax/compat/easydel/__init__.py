"""EasyDeL's interface, implemented with groupax (that of EasyDeL 0.3.0).

import groupax.compat.easydel as ed
"""

import logging
from types import SimpleNamespace

from groupax.compat.easydel.config import AttentionMechanisms as AttentionMechanisms
from groupax.compat.easydel.config import EasyDeLGradientCheckPointers as EasyDeLGradientCheckPointers
from groupax.compat.easydel.config import EasyDeLOptimizers as EasyDeLOptimizers
from groupax.compat.easydel.config import EasyDeLSchedulers as EasyDeLSchedulers
from groupax.compat.easydel.config import GRPOConfig as GRPOConfig
from groupax.compat.easydel.models import AutoEasyDeLModelForCausalLM as AutoEasyDeLModelForCausalLM
from groupax.compat.easydel.models import EasyDeLBaseConfigDict as EasyDeLBaseConfigDict
from groupax.compat.easydel.models import EasyDeLModel as EasyDeLModel
from groupax.compat.easydel.trainers import GRPOTrainer as GRPOTrainer
from groupax.compat.easydel.trainers import vInference as vInference

# Scripts call `ed.utils.get_logger`.
utils = SimpleNamespace(get_logger=logging.getLogger)
