"""The tiers below a device: blocks of pages in host memory, on disk and in stores of many nodes. No loop, no sockets."""
