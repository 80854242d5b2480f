"""The model whose KV a pool holds: given when the pool is created, and part of every cached block's key."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import PlainText

ModelName = Annotated[PlainText, Meta(min_length=1, max_length=256)]
Qualifier = Annotated[PlainText, Meta(max_length=256)]
COMPARED = ("name", "revision", "adapter")
"""Fields that must be equal in two pools that exchange pages; salts matter only to the cache."""

MAY_BE_UNKNOWN = ("revision",)
"""Fields compared only if both sides give them. An empty adapter is compared: a LoRA's KV is not the base model's."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The model that computed the KV in a pool's pages.

    Only pools with equal identity, layout and user share cached blocks. ``revision`` distinguishes versions of the
    weights: a commit or a checksum. ``adapter`` is the LoRA that all requests of the pool use; if requests use
    different ones, include the adapter in the blocks' hashes instead. ``salt`` separates caches of the same model; it
    is never shown.
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
        """Return ``NAME@REVISION+ADAPTER`` for errors, logs and lists; without the salt."""
        return f"{self.name}{self.revision and f'@{self.revision}'}{self.adapter and f'+{self.adapter}'}"

    @property
    def public(self) -> ModelIdentity:
        """Return the identity without the salt, which may be shown to others."""
        return msgspec.structs.replace(self, salt="") if self.salt else self
