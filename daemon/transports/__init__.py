"""Transports: how the bytes of a transfer op are copied, behind one protocol."""

if __name__ != "kvferry.daemon.transports":
    raise ImportError(f"import kvferry.daemon.transports, not {__name__}: that would be a second copy of it")
