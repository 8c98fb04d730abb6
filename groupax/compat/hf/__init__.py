"""Classes and functions of transformers and PEFT on groupax's models: load, adapt, sample, merge and save a model."""

from groupax.compat.hf.loading import AutoModelForCausalLM as AutoModelForCausalLM
from groupax.compat.hf.loading import BitsAndBytesConfig as BitsAndBytesConfig
from groupax.compat.hf.loading import LoraConfig as LoraConfig
from groupax.compat.hf.loading import PeftModel as PeftModel
from groupax.compat.hf.loading import TorchWeights as TorchWeights
from groupax.compat.hf.loading import as_model as as_model
from groupax.compat.hf.loading import base_weights as base_weights
from groupax.compat.hf.loading import get_peft_model as get_peft_model
from groupax.compat.hf.loading import is_peft_model as is_peft_model
from groupax.compat.hf.loading import is_torch_model as is_torch_model
from groupax.compat.hf.loading import prepare_model_for_kbit_training as prepare_model_for_kbit_training
from groupax.compat.hf.loading import wrap_with_peft as wrap_with_peft
from groupax.compat.hf.model import INERT as INERT
from groupax.compat.hf.model import CausalLM as CausalLM
from groupax.compat.hf.model import save_policy as save_policy
from groupax.compat.hf.model import warn_inert as warn_inert
