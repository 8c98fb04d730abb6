"""Environments with other names of methods, places, prompts and rewards than those of groupax's own contract."""

import numpy as np

from groupax.episodes.environment import EnvironmentClass, environment_rewards
from groupax.rewards.contract import Reward, arguments_for
from groupax.tools.tool import tools_of
from groupax.types import TrainerState

from .test_episodes import call, played


class Room:
    """An environment whose methods have names of their own."""

    def __init__(self, place):
        self.place, self.calls = place, []

    def enter(self, colour):
        return f" You enter the {colour} room {self.place % 2}."

    def act(self, number: int) -> str:
        """Acts.

        Args:
            number: A number.
        """
        self.calls.append(number)
        return str(number)

    def worth(self):
        return float(sum(self.calls))


ROOM = EnvironmentClass(
    "room",
    Room,
    tools_of(Room, public=True, reserved=("enter", "worth")),
    frozenset(("reset", "score")),
    renamed={"reset": "enter", "score": "worth"},
    arguments=lambda reset, row, seed: {"colour": row["colour"]},
    takes_place=True,
    reward_name="Room",
    starts_alike=False,
)


def acts(text, sample, turn):
    return call("act", number=sample + 1) if turn == 0 else "done"


def test_an_environment_may_have_other_names_and_start_differently_within_a_group():
    groups, script = played(acts, environments=ROOM, num_prompts=2, example={"colour": "red"})
    rollouts = [row for group in groups for row in group]
    assert [row.environment.place for row in rollouts] == [0, 1, 2, 3]  # whichever started first
    assert [row.environment_reward for row in rollouts] == [1.0, 2.0, 1.0, 2.0]
    assert [row.example["prompt"][-1]["content"] for row in groups[0]] == [
        f"go You enter the red room {n}." for n in (0, 1)
    ]
    assert not np.array_equal(groups[0][0].prompt_ids, groups[0][1].prompt_ids)
    for row in rollouts:  # each continued its own prompt
        assert [message["role"] for message in row.messages or ()] == ["assistant", "tool", "assistant"]
    assert sum("room 1" in text for text in script.prompts) == sum("room 0" in text for text in script.prompts) == 4


def test_functions_receive_the_environments_and_rewards_have_their_names():
    [group], _ = played(acts, environments=ROOM, example={"colour": "red"})
    [reward] = environment_rewards(ROOM)
    assert reward.name == "Room"
    assert reward.function(group) == [[0.0, 1.0], [0.0, 2.0]]  # of the turns
    given = arguments_for(Reward("calls", print, frozenset(("environments",))), group, TrainerState(), {})
    assert [each.calls for each in given["environments"]] == [[1], [2]]
