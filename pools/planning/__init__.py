"""Planning of page copies: manifests, pairing of entries, coverage, plans, gather and scatter."""

if __name__ != "kvferry.pools.planning":
    raise ImportError(f"import kvferry.pools.planning, not {__name__}: that would be a second copy of it")
