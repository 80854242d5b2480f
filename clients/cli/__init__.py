"""The operator's commands: plain clients of the same protocol."""
