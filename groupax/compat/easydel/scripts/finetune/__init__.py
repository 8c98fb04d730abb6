"""Training programs under the names of EasyDeL, each for one recipe.

`python -m groupax.compat.easydel.scripts.finetune.gsm8k_grpo --help` shows the options of one.
"""
