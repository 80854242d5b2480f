"""Paged KV memory: geometry, layouts, manifests, pairing, runs, plans, allocation, regions, copies.

Decisions are made by pure functions or objects without I/O. Independent of sockets, sessions and transfers.
"""

if __name__ != "kvferry.pools":
    raise ImportError(f"import kvferry.pools, not {__name__}: that would be a second copy of it")
