"""The demo: a real model's prefill hands its KV cache to decode, through a real daemon, in real processes."""
