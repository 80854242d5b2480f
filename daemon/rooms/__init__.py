"""Rooms: hand-offs from a source's pages to a destination's. A sans-I/O book, and the service that drives it."""

if __name__ != "kvferry.daemon.rooms":
    raise ImportError(f"import kvferry.daemon.rooms, not {__name__}: that would be a second copy of it")
