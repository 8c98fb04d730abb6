"""Training programs with the names and flags of EasyDeL's, one for each recipe."""

from collections.abc import Mapping, Sequence

from groupax.cli.train import train
from groupax.compat.easydel.config import AttentionMechanisms, named
from groupax.compat.fields import native_attention
from groupax.recipes import load_recipe

RENAMED = {
    "--repo_id": "--model",
    "--num_return_sequences": "--num_generations",
    "--total_batch_size": "--prompts_per_step",
}


def run(recipe: str, arguments: Sequence[str], weights: Mapping[str, tuple[str, float]] = {}) -> None:
    """Trains with a recipe, whose settings the flags override; flags of `groupax train` are known too.

    Args:
        recipe: Name of the recipe.
        arguments: The command line.
        weights: Flags of reward weights, each with the reward function's name, and a factor of its weight.
    """
    known = load_recipe(recipe)
    names = [reference.partition("(")[0].rpartition(":")[2] for reference in known.reward_funcs]
    own = dict(zip(names, known.config["reward_weights"], strict=True))
    remaining, flags = iter(arguments), ["--recipe", recipe]
    for argument in remaining:
        flag, _, value = argument.partition("=")
        if argument == "--use_wandb":
            flags += ["--report_to", "wandb"]
        elif flag == "--attn_mechanism":
            mechanism = named(value or next(remaining, ""), AttentionMechanisms, "attn_mechanism")
            flags += ["--attn_implementation", native_attention(mechanism)]
        elif flag in weights:
            name, factor = weights[flag]
            own[name] = factor * float(value or next(remaining, ""))
        else:
            flags.append(argument.replace(flag, RENAMED.get(flag, flag), 1))
    train([*flags, "--reward_weights", *map(str, own.values())])
