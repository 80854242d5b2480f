"""The wire: messages, codec, errors, versions and the client's sans-I/O core.

Knows no socket, no clock, no event loop and no torch. Everything else in kvferry is built on it.
"""
