"""Paged KV memory: geometry, layouts, manifests, pairing, runs, plans, allocation, regions, copies.

Everything that decides is a pure function or an object without I/O. Knows nothing of sockets, sessions or rooms.
"""
