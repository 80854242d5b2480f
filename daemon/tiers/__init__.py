"""Offload, restore and the prefix cache: operations, the copier, and the host, disk and remote tiers."""

if __name__ != "kvferry.daemon.tiers":
    raise ImportError(f"import kvferry.daemon.tiers, not {__name__}: that would be a second copy of it")
