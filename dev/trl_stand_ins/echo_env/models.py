"""The actions of the stand-in for the echo."""

from dataclasses import dataclass


@dataclass
class EchoAction:
    """A message."""

    message: str
