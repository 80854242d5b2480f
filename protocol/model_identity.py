"""Whose KV a pool's pages hold: said once, when the pool is made, and part of every name of a cached block."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import PlainText

ModelName = Annotated[PlainText, Meta(min_length=1, max_length=256)]
Qualifier = Annotated[PlainText, Meta(max_length=256)]
COMPARED = ("name", "revision", "adapter")
"""What two pools that exchange pages must have in common; salts are the cache's affair."""

MAY_BE_UNKNOWN = ("revision",)
"""What differs only where both say it. No adapter is said, too: the model's own KV is not that of a LoRA on it."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which model computed what a pool's pages hold.

    Pools with one identity, one layout and one user find each other's cached blocks; no others do. ``revision`` is
    whatever tells two states of the weights apart, a commit or a checksum. ``adapter`` is the LoRA that all requests of
    the pool run with; where each request has its own, it belongs into the blocks' hashes instead. ``salt`` keeps a
    cache apart from others of the very same model; it is never shown.
    """

    name: ModelName
    revision: Qualifier = ""
    adapter: Qualifier = ""
    salt: Qualifier = ""

    def __repr__(self) -> str:
        """Show all but the salt."""
        return f"<ModelIdentity {self.label}{' salted' if self.salt else ''}>"

    @property
    def label(self) -> str:
        """Return ``NAME@REVISION+ADAPTER``, as errors, logs and lists name it: without the salt."""
        return f"{self.name}{self.revision and f'@{self.revision}'}{self.adapter and f'+{self.adapter}'}"

    @property
    def public(self) -> ModelIdentity:
        """Return what others may see: all but the salt."""
        return msgspec.structs.replace(self, salt="") if self.salt else self
