"""The actions of the stand-in for OpenSpiel."""

from dataclasses import dataclass


@dataclass
class OpenSpielAction:
    """A move of a game."""

    action_id: int
    game_name: str
