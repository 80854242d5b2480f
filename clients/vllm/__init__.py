"""An adapter by which an unmodified vLLM has its KV cache, its transfers and its prefix cache in the daemon."""

if __name__ != "kvferry.clients.vllm":
    raise ImportError(f"import kvferry.clients.vllm, not {__name__}: that would be a second copy of it")
