"""The tiers below a device: blocks of pages in host memory and on disk, and the index of those that are cached."""
