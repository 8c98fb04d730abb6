"""Training programs with the names of EasyDeL's, one for each recipe.

`python -m groupax.compat.easydel.scripts.finetune.gsm8k_grpo --help` shows the options of one.
"""
