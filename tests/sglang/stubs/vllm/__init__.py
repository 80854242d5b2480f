"""Stands in for vLLM, of which SGLang takes one kernel on a CPU without AMX."""
