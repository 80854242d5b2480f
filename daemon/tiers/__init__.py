"""Offload, restore and the prefix cache: who asked for what, and what is copied when."""
