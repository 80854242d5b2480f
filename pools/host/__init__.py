"""What a host offers: memory within limits, huge pages, NUMA nodes. Asked by the daemon and by ``kvferry doctor``."""

if __name__ != "kvferry.pools.host":
    raise ImportError(f"import kvferry.pools.host, not {__name__}: that would be a second copy of it")
