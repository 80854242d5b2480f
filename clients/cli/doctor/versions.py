"""Versions as Huawei, torch and kernels write them: 25.5.0, 24.1.rc3, 8.2.RC1, 2.13.0+cpu, 5.10.0-136.oe2203."""

from __future__ import annotations

import re
from typing import NamedTuple

_PATTERN = re.compile(r"[vV]?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(alpha|beta|rc)\.?(\d*))?", re.IGNORECASE)
_FINAL = "z"


class Version(NamedTuple):
    """A comparable version: a release candidate comes before its release."""

    major: int
    minor: int
    patch: int
    stage: str
    number: int


def parse_version(text: str) -> Version | None:
    """Return the version at the start of a text; None if there is none."""
    match = _PATTERN.match(text.strip())
    if match is None:
        return None
    major, minor, patch, stage, number = match.groups()
    return Version(int(major), int(minor), int(patch or 0), (stage or _FINAL).lower(), int(number or 0))


def at_least(text: str, wanted: str) -> bool | None:
    """Return whether a version is at least ``wanted``; None if one of them is not a version."""
    found, least = parse_version(text), parse_version(wanted)
    return None if found is None or least is None else found >= least


def same_release(one: str, other: str) -> bool:
    """Return whether two versions agree in their first three numbers: 2.13.0 and 2.13.0+cpu and 2.13.0.post2 do."""
    first, second = parse_version(one), parse_version(other)
    return first is not None and second is not None and first[:3] == second[:3]
