"""The client's half of the protocol, which decides what a client does: no socket, clock or event loop."""

if __name__ != "kvferry.clients.core":
    raise ImportError(f"import kvferry.clients.core, not {__name__}: that would be a second copy of it")
