"""The tiers below a device: blocks of pages in host memory and on disk, and the index of cached blocks."""

if __name__ != "kvferry.pools.tiers":
    raise ImportError(f"import kvferry.pools.tiers, not {__name__}: that would be a second copy of it")
