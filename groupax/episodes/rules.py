"""The rules of a run's episodes: tools, environments, and how the model's turns are read and answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupax.data.bridge import Bridge, TextBridge
from groupax.data.examples import Examples
from groupax.episodes.custom import RolloutFunction
from groupax.episodes.environment import EnvironmentClass, environment_classes
from groupax.episodes.program import ProgramClass
from groupax.parallel import processes
from groupax.settings.fields import nearest
from groupax.settings.rollouts import EpisodeSettings
from groupax.terminal.printable import one_line, short_repr
from groupax.tools.formats.choose import CallFormat, call_format
from groupax.tools.tool import Tool, tools_from
from groupax.types import Prompt


@dataclass(frozen=True, eq=False)
class Kind:
    """The episodes of one class of environments, or those without any.

    Attributes:
        environment: Its class; None without one.
        tools: Tools of the model by name; the environment's own functions take the environment first.
        bridge: Makes the tokens between two turns of a conversation; None if the tokenizer has no chat template.
        text_bridge: Makes those of prompts that are texts.
        calls: Reads the calls of a turn; None without tools.
    """

    environment: EnvironmentClass | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    bridge: Bridge | None = None
    text_bridge: TextBridge | None = None
    calls: CallFormat | None = None

    @property
    def has_turns(self) -> bool:
        """True if episodes may have several turns."""
        return self.text_bridge is not None

    def bridge_of(self, prompt: Prompt) -> Bridge | TextBridge:
        """Returns what makes the tokens between two turns after this prompt."""
        bridge = self.text_bridge if isinstance(prompt, str) else self.bridge
        assert bridge is not None, "messages were encoded by a chat template"
        return bridge

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
        template_kwargs: Arguments of the chat template.
        max_prompt_tokens: Longest prompt with what an environment adds to it; None for no limit but the model's.
        rollout_func: Function of the user's that samples rollouts in the place of all this; None without one.
        templates: The `transcript.Templates` of programs; None without programs.
        adapters: Names of the adapters that the run trains; empty for a run that trains one or none.
        constraint_fault: Why programs may not constrain their turns; None if they may.
        warned: Kinds of failures that were warned of.
        hung: Names of functions that were warned of since they hang.
    """

    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    kinds: Mapping[str, Kind] = field(default_factory=lambda: {"": SINGLE_TURN})
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    rollout_func: RolloutFunction | None = None
    templates: Any = None
    adapters: tuple[str, ...] = ()
    constraint_fault: str | None = None
    warned: set[tuple[str, ...]] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)

    @property
    def max_result_bytes(self) -> int:
        """Longest text of a tool or an environment in UTF-8."""
        return int(1000 * self.settings.max_result_kb)

    @property
    def has_turns(self) -> bool:
        """True if episodes may have several turns."""
        return any(kind.has_turns for kind in self.kinds.values())

    @property
    def has_environments(self) -> bool:
        """True if episodes have environments."""
        return any(kind.environment is not None for kind in self.kinds.values())

    @property
    def names(self) -> dict[str, str]:
        """The names of the tools and environments, for readers; nothing without any."""
        tools = dict.fromkeys(name for kind in self.kinds.values() for name in kind.tools)
        environments = [kind.environment.name for kind in self.kinds.values() if kind.environment is not None]
        named = {"tools": list(tools), "environments": environments}
        return {label: one_line(", ".join(names)) for label, names in named.items() if names}

    def schemas_of(self, examples: Examples) -> list[list[Mapping[str, Any]]] | None:
        """Returns the schemas of the tools of each dataset row; None without any tool."""
        if not any(kind.tools for kind in self.kinds.values()):
            return None
        return [self.kind_of(examples[index]).schemas for index in range(len(examples))]

    def kind_of(self, example: Mapping[str, Any]) -> Kind:
        """Returns the kind of the episodes of a dataset row.

        Raises:
            ValueError: There are several environments, and the row's column `environment` names none of them.
        """
        if len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        name = str(example.get("environment"))
        if name not in self.kinds:
            raise ValueError(
                f"the dataset's column environment has {name!r}, which is no environment of the run; it has "
                f"{', '.join(self.kinds)}{nearest(name, self.kinds)}"
            )
        return self.kinds[name]

    def adapter_of(self, example: Mapping[str, Any]) -> str | None:
        """Returns the adapter that answers the prompt of a dataset row; None where programs choose, or without several.

        Raises:
            ValueError: The row's column `adapter` names none of them.
        """
        if not self.adapters or self.templates is not None:
            return None
        name = example.get("adapter")
        if name not in self.adapters:
            raise ValueError(
                f"the dataset's column adapter has {short_repr(name)}, which is no adapter of the run; it trains "
                f"{', '.join(self.adapters)}{nearest(str(name), self.adapters)}"
            )
        return name


SINGLE_TURNS = Rules()


def make_rules(
    tokenizer: Any,
    settings: EpisodeSettings,
    tools: Any = (),
    environments: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    eos_ids: Sequence[int] = (),
) -> Rules:
    """Returns the rules of episodes with these tools and environments.

    Args:
        tokenizer: Tokenizer with the chat template, which must render tools and what answers a turn.
        settings: Limits of episodes.
        tools: Functions that every episode may call.
        environments: A class of environments, a function that creates one, or a dict of several by name.
        template_kwargs: Arguments of the chat template.
        eos_ids: Tokens that end a turn.

    Raises:
        ValueError: A tool, an environment or the chat template cannot be used.
    """
    common, classes = tools_from(tools or ()), environment_classes(environments)
    if not common and not classes:
        return Rules(settings)
    kwargs = template_kwargs or {}
    if any(isinstance(each, ProgramClass) for each in classes.values()):
        from groupax.episodes.transcript import Templates  # needs packages of an extra

        return _rules_of_programs(Templates(tokenizer, kwargs, eos_ids), settings, common, classes)

    def kind(environment: EnvironmentClass | None) -> Kind:
        tools = _tools_of(common, environment)
        schemas = [tool.schema for tool in tools.values()]
        bridge = Bridge(tokenizer, schemas, kwargs, eos_ids) if tools or tokenizer.chat_template else None
        calls = call_format(tokenizer, kwargs) if tools else None
        return Kind(environment, tools, bridge, TextBridge(tokenizer), calls)

    return Rules(settings, {name: kind(each) for name, each in classes.items()} or {"": kind(None)}, kwargs)


def _rules_of_programs(
    templates: Any,
    settings: EpisodeSettings,
    tools: Mapping[str, Tool],
    classes: Mapping[str, EnvironmentClass],
) -> Rules:
    """Returns the rules of episodes that are runs of programs.

    Raises:
        ValueError: There are other environments too, or tools, which programs bring with them.
    """
    others = [name for name, each in classes.items() if not isinstance(each, ProgramClass)]
    if others:
        raise ValueError(
            f"programs cannot be mixed with other environments in a run: {', '.join(others)}; train them in another run"
        )
    if tools:
        raise ValueError(
            f"a program names its tools in its own requests, so that tools={', '.join(tools)} would have no effect"
        )
    urls = {each.listening.public_url for each in classes.values() if isinstance(each, ProgramClass)} - {None}
    if processes.num_processes() > 1 and any("{port}" not in str(url) for url in urls):
        raise ValueError(
            f"each of the run's {processes.num_processes()} processes answers programs at a port of its own; write "
            "{port} into public_url, e.g. 'http://trainer:{port}'"
        )
    text_bridge = TextBridge(templates.tokenizer)
    kinds = {name: Kind(each, text_bridge=text_bridge) for name, each in classes.items()}
    return Rules(settings, kinds, templates.template_kwargs, templates=templates)


def _tools_of(common: Mapping[str, Tool], environment: EnvironmentClass | None) -> dict[str, Tool]:
    """Returns the tools of episodes, those that all of them have and those of their environment."""
    own = environment.tools if environment is not None else {}
    both = sorted(common.keys() & own.keys())
    if environment is not None and both:
        raise ValueError(
            f"environment {environment.name!r} has tools of the same name as those of the run: {', '.join(both)}; "
            "rename them"
        )
    return {**common, **own}
