"""Where a pool's region lives, one module a kind of device."""
