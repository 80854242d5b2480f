"""Offload, restore and the prefix cache: who asked for what, and what is copied when."""

if __name__ != "kvferry.daemon.tiers":
    raise ImportError(f"import kvferry.daemon.tiers, not {__name__}: that would be a second copy of it")
