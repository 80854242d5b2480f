"""One service for each family of requests."""

if __name__ != "kvferry.daemon.services":
    raise ImportError(f"import kvferry.daemon.services, not {__name__}: that would be a second copy of it")
