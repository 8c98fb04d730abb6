"""TRL's `apply_chat_template`. Imports no jax."""

import functools
from collections.abc import Mapping
from typing import Any


def apply_chat_template(
    example: Mapping[str, Any], processing_class: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, str]:
    """Returns the conversations of an example as text, rendered by the chat template, under the same keys.

    Args:
        example: Conversations under `prompt` and optionally `completion`, or under `messages`.
        processing_class: Tokenizer with a chat template.
        tools: Tools that the template lists.
        template_kwargs: Arguments of the template.

    Raises:
        KeyError: The example has neither `prompt` nor `messages`.
        ValueError: No completion can follow the prompt's last message, or the template renders the prompt differently
            when a completion follows.
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
        raise ValueError(f"the prompt's last message has the role {role!r}; it must be user, tool or assistant")
    is_question = role != "assistant"
    prompt = render(example["prompt"], add_generation_prompt=is_question, continue_final_message=not is_question)
    if "completion" not in example:
        return {"prompt": prompt}
    text = render([*example["prompt"], *example["completion"]])
    if not text.startswith(prompt):
        raise ValueError("the chat template renders the prompt differently when a completion follows")
    return {"prompt": prompt, "completion": text[len(prompt) :]}
