"""How bytes of a transfer op move: one module a way, one contract for all."""

if __name__ != "kvferry.daemon.transports":
    raise ImportError(f"import kvferry.daemon.transports, not {__name__}: that would be a second copy of it")
