"""The daemon as a process: its directory, logs, signals, memory and service manager."""

if __name__ != "kvferry.daemon.process":
    raise ImportError(f"import kvferry.daemon.process, not {__name__}: that would be a second copy of it")
