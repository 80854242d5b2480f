"""The devices that hold pools, and device events."""

if __name__ != "kvferry.daemon.devices":
    raise ImportError(f"import kvferry.daemon.devices, not {__name__}: that would be a second copy of it")
