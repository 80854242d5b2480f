"""Paged KV memory: geometry, layouts, manifests, pairing, runs, plans, allocation, regions, copies.

Everything that decides is a pure function or an object without I/O. Knows nothing of sockets, sessions or transfers.
"""

if __name__ != "kvferry.pools":
    raise ImportError(f"import kvferry.pools, not {__name__}: that would be a second copy of it")
