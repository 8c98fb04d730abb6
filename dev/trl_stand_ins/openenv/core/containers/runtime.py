"""A name that scripts import for containers, which they need not start here."""


class LocalDockerProvider:
    """A class that is never used: the stand-ins need no container."""
