"""The daemon's interface to engines and operators: sockets, sessions, and the dispatch of requests."""

if __name__ != "kvferry.daemon.control":
    raise ImportError(f"import kvferry.daemon.control, not {__name__}: that would be a second copy of it")
