"""The wire: messages, codec, errors, versions and the client's sans-I/O core.

Knows no socket, no clock, no event loop and no torch. Everything else in kvferry is built on it.
"""

if __name__ != "kvferry.protocol":
    raise ImportError(f"import kvferry.protocol, not {__name__}: that would be a second copy of it")
