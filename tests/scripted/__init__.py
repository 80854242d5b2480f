"""Fakes of the daemon's surroundings, for tests."""

if __name__ != "tests.scripted":
    raise ImportError(f"import tests.scripted, not {__name__}: that would be a second copy of it")
