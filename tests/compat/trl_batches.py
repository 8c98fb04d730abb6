"""TRL's batch arithmetic, recorded: which prompts each generation has, and which slices each optimizer step takes.

    python -m tests.compat.trl_batches

TRL's own sampler, data loader, buffer and loop run; only generation and loss are replaced, as neither changes what is
counted here. It writes tests/golden/trl_batches.json.
"""

import json
import tempfile
import warnings
from pathlib import Path

FILE = Path(__file__).parents[1] / "golden" / "trl_batches.json"
PDB, GA, SPG, G, MU = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
)
# Prompts in the dataset, and settings.
CASES = [
    (10, {}),
    (20, {PDB: 4, GA: 8, G: 4}),
    (35, {PDB: 8, GA: 4, G: 2, MU: 4, "num_train_epochs": 2}),
    (17, {PDB: 4, GA: 2, SPG: 8, G: 4}),
    (11, {PDB: 8, G: 4, "max_steps": 12, "seed": 7}),
    (13, {PDB: 8, G: 4, "num_train_epochs": 1.5}),
    (6, {PDB: 4, SPG: 2, G: 8, MU: 3, "num_train_epochs": 1}),
]


def record(num_prompts, settings):
    """What TRL does with these settings.

    Returns:
        generations: of each, the optimizer steps that were made before it, and its prompts in their order;
        steps: of each optimizer step, the generation and the slice of every micro-batch.
    """
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from tests.data.test_config_and_data import a_tokenizer

    generations, steps = [], {}

    class Counting(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            prompts = [int(row["index"]) for row in inputs]
            G = self.num_generations
            assert all(prompts[i] == prompts[i - i % G] for i in range(len(prompts)))
            generations.append([self.state.global_step, prompts[::G]])
            # rows are shuffled before they are cut; a slice is known by being the same object later
            return {"prompt_ids": torch.arange(len(prompts))}

        def _compute_loss(self, model, inputs):
            place = next(i for i, part in enumerate(self._buffered_inputs) if part is inputs)
            steps.setdefault(self.state.global_step, []).append([len(generations) - 1, place])
            return sum(p.sum() for p in model.parameters()) * 0.0

        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
            self._step += 1
            return loss.detach()

    tokenizer = a_tokenizer(eos_token="<eos>", pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=13, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, head_dim=4
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=10**6,
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            **settings,
        )
        dataset = Dataset.from_list([{"prompt": "abc", "index": index} for index in range(num_prompts)])
        trainer = Counting(
            model=LlamaForCausalLM(config),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
        )
        trainer.log = lambda *_, **__: None
        trainer.train()
    assert sorted(steps) == list(range(trainer.state.global_step))
    return {"generations": generations, "steps": [steps[step] for step in sorted(steps)]}


if __name__ == "__main__":
    cases = [
        {"num_prompts": num_prompts, "settings": settings, **record(num_prompts, settings)}
        for num_prompts, settings in CASES
    ]
    for case in cases:
        print(case["num_prompts"], case["settings"], len(case["generations"]), len(case["steps"]))
    FILE.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
