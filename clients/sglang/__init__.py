"""kvferry in SGLang's processes: its KV memory, its transfers between prefill and decode, what leaves and comes back.

SGLang finds ``plugin.register`` by an entry point and calls it in each of its processes. Nothing here is imported where
SGLang is not. docs/sglang.md says how to run it.
"""

from __future__ import annotations

if __name__ != "kvferry.clients.sglang":
    raise ImportError(f"import kvferry.clients.sglang, not {__name__}: that would be a second copy of it")
