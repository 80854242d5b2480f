"""Connections to other daemons."""

if __name__ != "kvferry.daemon.peers":
    raise ImportError(f"import kvferry.daemon.peers, not {__name__}: that would be a second copy of it")
