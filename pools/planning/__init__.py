"""What pages a transfer copies, and how: manifests, pairing of entries, plans, gathering."""

if __name__ != "kvferry.pools.planning":
    raise ImportError(f"import kvferry.pools.planning, not {__name__}: that would be a second copy of it")
