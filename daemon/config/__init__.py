"""The configuration file: its schema, its checks and its defaults."""

if __name__ != "kvferry.daemon.config":
    raise ImportError(f"import kvferry.daemon.config, not {__name__}: that would be a second copy of it")
