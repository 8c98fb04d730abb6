"""The place of `trl.experimental`, which groupax does not have: importing it fails and says what to use instead."""

raise ImportError(
    "groupax.compat.trl has nothing of trl.experimental. HarborSpec and OpenRewardSpec need no change: import them "
    "from trl.experimental, and pass their datasets, environments and rewards to GRPOTrainer of groupax.compat.trl. "
    "In the place of AsyncGRPOTrainer, GRPOTrainer with use_vllm=True and vllm_mode='server' samples on other "
    "machines. Other trainers of trl.experimental run with trl only"
)
