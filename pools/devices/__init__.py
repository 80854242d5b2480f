"""Regions: the memory of pools, one module per kind of device."""

if __name__ != "kvferry.pools.devices":
    raise ImportError(f"import kvferry.pools.devices, not {__name__}: that would be a second copy of it")
