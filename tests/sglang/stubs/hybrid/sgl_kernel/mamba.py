"""Its names of another module."""

from __future__ import annotations

from sglang_hybrids_on_cpu import convolve as causal_conv1d_fn_cpu
from sglang_hybrids_on_cpu import convolve_next as causal_conv1d_update_cpu

from sgl_kernel import chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]
