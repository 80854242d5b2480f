"""Layouts: from a pool's spec to its manifest, one module per kind of attention or state."""

from __future__ import annotations

if __name__ != "kvferry.pools.layouts":
    raise ImportError(f"import kvferry.pools.layouts, not {__name__}: that would be a second copy of it")

from typing import assert_never

from kvferry.pools.layouts import mamba, mha, mla
from kvferry.protocol.manifests import HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec


def manifest_of(spec: PoolSpec) -> Manifest:
    """Return the manifest of a pool with this spec; entries lie one after another from base 0.

    Raises:
        InvalidFieldError: the spec is invalid; names the field.
        GeometryMismatchError: a bug in a layout: its two derivations of the bytes of a page disagree.
    """
    if isinstance(spec, MhaSpec):
        return mha.manifest_of(spec)
    if isinstance(spec, MlaSpec):
        return mla.manifest_of(spec)
    if isinstance(spec, HybridSwaSpec):
        return mha.hybrid_manifest_of(spec)
    if isinstance(spec, MambaSpec):
        return mamba.manifest_of(spec)
    assert_never(spec)
