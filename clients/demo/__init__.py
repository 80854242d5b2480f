"""``kvferry demo``: a real model's prefill hands its KV cache to decode, through a real daemon, in real processes."""

if __name__ != "kvferry.clients.demo":
    raise ImportError(f"import kvferry.clients.demo, not {__name__}: that would be a second copy of it")
