"""The rules of a run's episodes: tools, environments, and how the model's turns are read and answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupax.core.settings.fields import check_known, nearest
from groupax.core.settings.references import import_attribute, parse_call
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.terminal.printable import one_line
from groupax.core.types import Prompt
from groupax.data.bridge import Bridge, TextBridge
from groupax.data.examples import Examples
from groupax.episodes.custom import RolloutFunction
from groupax.episodes.environment import EnvironmentClass, environment_classes
from groupax.episodes.program import ProgramClass
from groupax.parallel import processes
from groupax.tools.calls import ParsedTurn
from groupax.tools.formats import CallFormat, call_format
from groupax.tools.tool import Tool, tools_from

# Functions that make environments or tools, whose names need no module.
ENVIRONMENTS = {
    "openenv": "groupax.satellites.environments.openenv:openenv",
    "program": "groupax.satellites.environments.program:program",
}
TOOLS = {
    "python_tool": "groupax.satellites.environments.python_tool:python_tool",
    "mcp": "groupax.satellites.environments.mcp_tools:mcp",
}


@dataclass(frozen=True, eq=False)
class Setup:
    """The tools, environment and formats that episodes share: those of one class of environments, or those without any.

    Attributes:
        environment: Class of their environments; None without one.
        tools: Tools of the model by name; the environment's own functions take the environment first.
        bridge: Makes the tokens between two turns of a conversation; None if the tokenizer has no chat template.
        text_bridge: Makes those of prompts that are texts; None where episodes have one turn.
        calls: Reads the calls of a turn; None without tools.
    """

    environment: EnvironmentClass | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    bridge: Bridge | None = None
    text_bridge: TextBridge | None = None
    calls: CallFormat | None = None

    def bridge_of(self, prompt: Prompt) -> Bridge | TextBridge:
        """Returns what makes the tokens between two turns after this prompt."""
        bridge = self.text_bridge if isinstance(prompt, str) else self.bridge
        assert bridge is not None, "messages were encoded by a chat template"
        return bridge

    def parse(self, text: str) -> ParsedTurn:
        """Takes a turn apart."""
        return ParsedTurn(text, "", ()) if self.calls is None else self.calls.parse(text)

    @property
    def name(self) -> str:
        """The name of the environment, for warnings."""
        return "tools" if self.environment is None else self.environment.name

    @property
    def own_tools(self) -> Mapping[str, Tool]:
        """The tools of the environment."""
        return {} if self.environment is None else self.environment.tools

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The schemas of the tools, as chat templates take them."""
        return [tool.schema for tool in self.tools.values()]


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of a run's episodes; without any, an episode is one turn.

    Attributes:
        settings: Limits, and what becomes of faults.
        setups: Setups by the name of the environment, "" without one.
        template_kwargs: Arguments of the chat template.
        max_prompt_tokens: Longest prompt with what an environment adds to it; None for no limit but the model's.
        rollout_func: Function of the user's that samples rollouts in the place of all this; None without one.
        templates: The `transcript.Templates` of programs; None without programs.
        constraint_fault: Why programs may not constrain their turns; None if they may.
        warned: Kinds of failures that were warned of.
        hung: Names of functions that were warned of since they hang.
    """

    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    setups: Mapping[str, Setup] = field(default_factory=lambda: {"": Setup()})
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    rollout_func: RolloutFunction | None = None
    templates: Any = None
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
        return any(setup.text_bridge is not None for setup in self.setups.values())

    @property
    def has_environments(self) -> bool:
        """True if episodes have environments."""
        return any(setup.environment is not None for setup in self.setups.values())

    @property
    def names(self) -> dict[str, str]:
        """The names of the tools and environments, for readers; nothing without any."""
        tools = dict.fromkeys(name for setup in self.setups.values() for name in setup.tools)
        environments = [setup.name for setup in self.setups.values() if setup.environment is not None]
        named = {"tools": list(tools), "environments": environments}
        return {label: one_line(", ".join(names)) for label, names in named.items() if names}

    def schemas_of(self, examples: Examples) -> list[list[Mapping[str, Any]]] | None:
        """Returns the schemas of the tools of each dataset row; None without any tool."""
        if not any(setup.tools for setup in self.setups.values()):
            return None
        return [self.setup_of(examples[index]).schemas for index in range(len(examples))]

    def setup_of(self, example: Mapping[str, Any]) -> Setup:
        """Returns the setup of the episodes of a dataset row."""
        if len(self.setups) == 1:
            return next(iter(self.setups.values()))
        name = str(example.get("environment"))
        fault = f"the dataset's column environment has {name!r}, which is not an environment of the run"
        check_known(name, self.setups, fault)
        return self.setups[name]


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
    kwargs, text_bridge = template_kwargs or {}, TextBridge(tokenizer)
    programs = {name: each for name, each in classes.items() if isinstance(each, ProgramClass)}
    if programs:
        _check_programs(programs, common, [name for name in classes if name not in programs])
        from groupax.episodes.transcript import Templates  # needs packages of an extra

        setups = {name: Setup(each, text_bridge=text_bridge) for name, each in programs.items()}
        return Rules(settings, setups, kwargs, templates=Templates(tokenizer, kwargs, eos_ids))

    def setup(environment: EnvironmentClass | None) -> Setup:
        own = environment.tools if environment is not None else {}
        both = sorted(common.keys() & own.keys())
        if environment is not None and both:
            raise ValueError(
                f"environment {environment.name!r} has tools of the same name as those of the run: {', '.join(both)}; "
                "rename them"
            )
        tools = {**common, **own}
        schemas = [tool.schema for tool in tools.values()]
        bridge = Bridge(tokenizer, schemas, kwargs, eos_ids) if tools or tokenizer.chat_template else None
        return Setup(environment, tools, bridge, text_bridge, call_format(tokenizer, kwargs) if tools else None)

    return Rules(settings, {name: setup(each) for name, each in classes.items()} or {"": setup(None)}, kwargs)


def _check_programs(programs: Mapping[str, ProgramClass], tools: Mapping[str, Tool], others: Sequence[str]) -> None:
    """Checks that programs are alone."""
    if others:
        raise ValueError(
            f"programs cannot be mixed with other environments in a run: {', '.join(others)}; train them in another run"
        )
    if tools:
        raise ValueError(
            f"a program names its tools in its own requests, so that tools={', '.join(tools)} would have no effect"
        )
    urls = {each.listening.public_url for each in programs.values()} - {None}
    if processes.num_processes() > 1 and any("{port}" not in str(url) for url in urls):
        raise ValueError(
            f"each of the run's {processes.num_processes()} processes answers programs at a port of its own; write "
            "{port} into public_url, e.g. 'http://trainer:{port}'"
        )


def load_tools(references: Sequence[str]) -> list[Any]:
    """Returns the tools with these references.

    Args:
        references: "module:function" for a function, or "module:maker(option=1)" for the tool or the list of tools that
            a function returns.

    Raises:
        ValueError: One cannot be found, or the options do not fit.
    """
    found = [_load("tool", reference, TOOLS) for reference in references]
    return [each for made in found for each in (made if isinstance(made, list | tuple) else [made])]


def load_environments(references: Sequence[str]) -> Any:
    """Returns the environments with these references, as `GRPOTrainer` takes them; None without any.

    Args:
        references: "module:Class", "module:maker(option=1)" or "openenv(url='ws://...')"; of several, each with the
            name that the dataset's column `environment` has for it: "name=module:Class".

    Raises:
        ValueError: One cannot be found, the options do not fit, or several have no names.
    """
    named = [_named(reference) for reference in references]
    if len(named) == 1 and not named[0][0]:
        return _load("environment", named[0][1], ENVIRONMENTS)
    names = [name for name, _ in named]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"several environments need different names, as in name=module:Class, got {', '.join(references)}; the "
            "dataset's column environment names one of them"
        )
    return {name: _load("environment", reference, ENVIRONMENTS) for name, reference in named} or None


def _named(reference: str) -> tuple[str, str]:
    """Returns the name before the reference, if there is one, and the reference."""
    name, _, rest = reference.partition("=")
    return (name, rest) if rest and name.isidentifier() else ("", reference)


def _load(what: str, reference: str, known: Mapping[str, str]) -> Any:
    name, options, words = parse_call(what, reference)
    if ":" not in name and name not in known:
        raise ValueError(
            f"{what} {reference!r} must be written as 'module:name' or one of {', '.join(known)}{nearest(name, known)}"
        )
    if words:
        raise ValueError(f"{what} {reference!r}: {' and '.join(words.values())} must be numbers or quoted texts")
    found = import_attribute(what, known.get(name, name))
    if "(" not in reference:
        return found
    try:
        return found(**options)
    except TypeError as error:
        raise ValueError(f"{what} {reference!r} cannot be called: {error}") from error
