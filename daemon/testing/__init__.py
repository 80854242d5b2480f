"""Fakes of the daemon's surroundings, for tests."""

if __name__ != "kvferry.daemon.testing":
    raise ImportError(f"import kvferry.daemon.testing, not {__name__}: that would be a second copy of it")
