"""Rooms: hand-offs from a source's pages to a destination's. A sans-I/O book, and the service that drives it."""
