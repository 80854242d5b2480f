"""The daemon's configuration file: its schema, its defaults and its checks. The daemon reads it, and so does doctor."""

if __name__ != "kvferry.protocol.config":
    raise ImportError(f"import kvferry.protocol.config, not {__name__}: that would be a second copy of it")
