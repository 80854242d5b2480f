"""KV transfers from a source's pages to a destination's: a state machine without I/O."""

if __name__ != "kvferry.daemon.transfer":
    raise ImportError(f"import kvferry.daemon.transfer, not {__name__}: that would be a second copy of it")
