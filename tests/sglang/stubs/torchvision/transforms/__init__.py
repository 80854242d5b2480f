"""Names for type hints and defaults."""


class Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> type:
        """Return one more of its kind; Python's own names stay unknown."""
        return __getattr__(name)


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {})
