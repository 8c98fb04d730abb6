"""TRL's `apply_chat_template`. Imports no jax."""

import functools
from collections.abc import Mapping
from typing import Any


def apply_chat_template(
    example: Mapping[str, Any], processing_class: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, str]:
    """Returns the conversations of an example as the chat template formats them, under the same names.

    Args:
        example: An example with `prompt` and perhaps `completion`, or with `messages`.
        processing_class: A tokenizer with a chat template.
        tools: Tools that the template lists.
        template_kwargs: Arguments of the template.

    Raises:
        KeyError: the example has neither `prompt` nor `messages`.
        ValueError: a prompt ends with a message that nothing can follow.
    """
    render = functools.partial(
        processing_class.apply_chat_template,
        tools=tools or None,
        tokenize=False,
        **example.get("chat_template_kwargs", {}),
        **template_kwargs,
    )
    if "messages" in example:
        return {"messages": render(example["messages"])}
    if "prompt" not in example:
        raise KeyError(f"the example has neither prompt nor messages, but {', '.join(example)}")
    role = example["prompt"][-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"the prompt's last message is of role {role!r}; an answer follows on user or tool")
    asks = role != "assistant"
    prompt = render(example["prompt"], add_generation_prompt=asks, continue_final_message=not asks)
    if "completion" not in example:
        return {"prompt": prompt}
    whole = render([*example["prompt"], *example["completion"]])
    if not whole.startswith(prompt):
        raise ValueError("the chat template writes the prompt otherwise when a completion follows")
    return {"prompt": prompt, "completion": whole[len(prompt) :]}
