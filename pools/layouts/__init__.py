"""Layouts: from a pool's spec to its manifest, one module a kind."""

from __future__ import annotations

from kvferry.pools.layouts import mha
from kvferry.protocol.manifests import Manifest, PoolSpec


def manifest_of(spec: PoolSpec) -> Manifest:
    """Return the manifest of a pool with this spec; entries are laid out one after another from base 0.

    Raises:
        InvalidFieldError: the spec makes no sense; the field is named.
        GeometryMismatchError: a bug in a layout: its two derivations of a page's bytes disagree.
    """
    return mha.manifest_of(spec)
