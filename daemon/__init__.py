"""The daemon: one control loop that owns the pools, and thin shells around sans-I/O cores."""

if __name__ != "kvferry.daemon":
    raise ImportError(f"import kvferry.daemon, not {__name__}: that would be a second copy of it")
