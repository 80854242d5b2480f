"""State windows and trimming, and the graph tables that captured graphs read."""

if __name__ != "kvferry.attention":
    raise ImportError(f"import kvferry.attention, not {__name__}: that would be a second copy of it")
