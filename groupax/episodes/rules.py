"""The rules of a run's episodes: tools, environments, and how the model's turns are read and answered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from groupax.data.bridge import Bridge
from groupax.episodes.environment import EnvironmentClass, environment_classes
from groupax.settings.episodes import EpisodeSettings
from groupax.settings.fields import nearest
from groupax.tools.formats import CallFormat, call_format
from groupax.tools.runner import ToolRunner
from groupax.tools.tool import Tool, tools_from


@dataclass(frozen=True, eq=False)
class Kind:
    """The episodes of one class of environments, or those without any.

    Attributes:
        environment: Its class; None without one.
        tools: Tools of the model by name; the environment's own functions take the environment first.
        bridge: Tokens between two turns; None where every episode has one turn.
        calls: Reads the calls of a turn; None without tools.
    """

    environment: EnvironmentClass | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    bridge: Bridge | None = None
    calls: CallFormat | None = None

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The schemas of the tools, as chat templates take them."""
        return [tool.schema for tool in self.tools.values()]


SINGLE_TURN = Kind()


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of a run's episodes; without any, an episode is one turn.

    Attributes:
        settings: Limits, and what becomes of faults.
        kinds: Kinds of episodes by the name of the environment, "" without one.
        runner: Runs tools and environments; None where every episode has one turn.
        template_kwargs: Arguments of the chat template.
        max_prompt_tokens: Longest prompt with what an environment adds to it; None for no limit but the model's.
    """

    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    kinds: Mapping[str, Kind] = field(default_factory=lambda: {"": SINGLE_TURN})
    runner: ToolRunner | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None

    def kind_of(self, example: Mapping[str, Any]) -> Kind:
        """Returns the kind of the episodes of a dataset row.

        Raises:
            ValueError: There are several environments, and the row's column `environment` names none of them.
        """
        if len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        name = example.get("environment")
        if name not in self.kinds:
            raise ValueError(
                f"the dataset's column environment has {name!r}, which is no environment of the run"
                f"{nearest(str(name), self.kinds)}; it has {', '.join(self.kinds)}"
            )
        return self.kinds[name]


SINGLE_TURNS = Rules()


def make_rules(
    tokenizer: Any,
    settings: EpisodeSettings,
    tools: Any = (),
    environments: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Rules:
    """Returns the rules of episodes with these tools and environments.

    Args:
        tokenizer: Tokenizer with the chat template, which must render tools and what answers a turn.
        settings: Limits of episodes.
        tools: Functions that every episode may call.
        environments: A class of environments, a function that creates one, or a dict of several by name.
        template_kwargs: Arguments of the chat template.

    Raises:
        ValueError: A tool, an environment or the chat template cannot be used.
    """
    common, classes = tools_from(tools or ()), environment_classes(environments)
    if not common and not classes:
        return Rules(settings)
    kwargs = template_kwargs or {}
    kinds = {name: _kind(tokenizer, common, each, kwargs) for name, each in classes.items()}
    kinds = kinds or {"": _kind(tokenizer, common, None, kwargs)}
    runner = ToolRunner(settings.tool_workers, settings.tool_timeout_s, int(1000 * settings.max_result_kb))
    return Rules(settings, kinds, runner, kwargs)


def _kind(
    tokenizer: Any, common: Mapping[str, Tool], environment: EnvironmentClass | None, kwargs: Mapping[str, Any]
) -> Kind:
    own = environment.tools if environment is not None else {}
    both = sorted(common.keys() & own.keys())
    if environment is not None and both:
        raise ValueError(
            f"environment {environment.name!r} has tools of the same name as those of the run: {', '.join(both)}; "
            "rename them"
        )
    tools = {**common, **own}
    bridge = Bridge(tokenizer, [tool.schema for tool in tools.values()], kwargs)
    return Kind(environment, tools, bridge, call_format(tokenizer) if tools else None)
