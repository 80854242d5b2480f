"""Fakes of the daemon's surroundings, for tests."""
