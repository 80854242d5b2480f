"""The operator's commands: plain clients of the same protocol."""

if __name__ != "kvferry.clients.cli":
    raise ImportError(f"import kvferry.clients.cli, not {__name__}: that would be a second copy of it")
