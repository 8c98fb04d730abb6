"""Training programs: `python -m groupax.scripts.finetune.gsm8k_grpo --help`. Each is a face of a recipe."""
