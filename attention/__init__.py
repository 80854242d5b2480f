"""State windows and trimming, and the graph tables that captured graphs read."""
