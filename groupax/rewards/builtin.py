"""The built-in rewards by name, for YAML files and the command line. Imports no jax."""

import functools
from collections.abc import Callable
from typing import Any

from groupax.rewards.code import code_tests
from groupax.rewards.formats import (
    integer_answer,
    regex_match,
    think_answer_correct,
    think_answer_format,
    think_format,
    xml_count,
    xml_format,
)
from groupax.rewards.lengths import cosine_length, repetition_penalty, soft_overlong
from groupax.rewards.maths import gsm8k_accuracy, math_accuracy
from groupax.rewards.sandbox import check_sandbox

BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        code_tests,
        cosine_length,
        gsm8k_accuracy,
        integer_answer,
        math_accuracy,
        regex_match,
        repetition_penalty,
        soft_overlong,
        think_answer_correct,
        think_answer_format,
        think_format,
        xml_count,
        xml_format,
    )
}


def check_setup(function: Callable[..., Any]) -> None:
    """Checks that the programs which a built-in reward needs are installed on this machine.

    Raises:
        RunError: They are not.
    """
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        function, options = function.func, {**function.keywords, **options}
    if function is code_tests:
        check_sandbox(options.get("sandbox", "bwrap"))
