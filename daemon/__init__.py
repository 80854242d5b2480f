"""The daemon: one control loop that owns the pools, and thin shells around sans-I/O cores."""
