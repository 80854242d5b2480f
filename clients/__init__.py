"""Clients of the daemon: for engines (sync and async), and the operator's commands.

An engine needs three names: ``Client`` or ``AsyncClient``, and ``pages`` to describe what it sends::

    with Client.connect(name="prefill-0") as client:
        pool = client.create_pool("prefill", MhaSpec(...))
        ids = client.allocate("prefill", 8)
        pool.tensor("main", "k")[layer, ids] = ...
        transfer = client.send("prefill", request_id, [pages(ids, tokens=1000)], first_token=42)
        client.wait_settled(transfer)
        client.free("prefill", ids)

What is named here is loaded when it is first used; torch only where a tensor is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if __name__ != "kvferry.clients":
    raise ImportError(f"import kvferry.clients, not {__name__}: that would be a second copy of it")

if TYPE_CHECKING:
    from kvferry.clients.async_client import AsyncClient
    from kvferry.clients.calls import BlockTableEntries, Pages, no_pages, pages, pages_wanted
    from kvferry.clients.core.followed import TierOperation, Transfer
    from kvferry.clients.events import EventRing
    from kvferry.clients.hashing import block_hashes
    from kvferry.clients.pool import AttachedPool
    from kvferry.clients.shared_memory import SharedMemory
    from kvferry.clients.slots import pages_from_slots, slots_from_pages
    from kvferry.clients.sync_client import Client
    from kvferry.clients.tables import Tables
    from kvferry.protocol.errors import KvferryError
    from kvferry.protocol.ids import ModelIdentity, new_request_id
    from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec
    from kvferry.protocol.tier_messages import CacheGroup, ChainStart

__all__ = [
    "AsyncClient",
    "AttachedPool",
    "BlockTableEntries",
    "CacheGroup",
    "ChainStart",
    "Client",
    "DraftSpec",
    "EventRing",
    "HybridSwaSpec",
    "KvferryError",
    "MambaSpec",
    "MhaSpec",
    "MlaSpec",
    "ModelIdentity",
    "Pages",
    "SharedMemory",
    "Tables",
    "TierOperation",
    "Transfer",
    "block_hashes",
    "new_request_id",
    "no_pages",
    "pages",
    "pages_from_slots",
    "pages_wanted",
    "slots_from_pages",
]

_MODULES = {
    "kvferry.clients.async_client": ("AsyncClient",),
    "kvferry.clients.events": ("EventRing",),
    "kvferry.clients.hashing": ("block_hashes",),
    "kvferry.clients.calls": ("BlockTableEntries", "Pages", "no_pages", "pages", "pages_wanted"),
    "kvferry.clients.pool": ("AttachedPool",),
    "kvferry.clients.shared_memory": ("SharedMemory",),
    "kvferry.clients.slots": ("pages_from_slots", "slots_from_pages"),
    "kvferry.clients.sync_client": ("Client",),
    "kvferry.clients.tables": ("Tables",),
    "kvferry.clients.core.followed": ("TierOperation", "Transfer"),
    "kvferry.protocol.errors": ("KvferryError",),
    "kvferry.protocol.ids": ("ModelIdentity", "new_request_id"),
    "kvferry.protocol.manifests": ("DraftSpec", "HybridSwaSpec", "MambaSpec", "MhaSpec", "MlaSpec"),
    "kvferry.protocol.tier_messages": ("CacheGroup", "ChainStart"),
}
"""Where each name is: the imports above, as the interpreter needs them."""


def __getattr__(name: str) -> object:
    """Load a name when it is first used: ``kvferry ping`` imports this package too, and needs none of them."""
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names also before they are loaded."""
    return sorted({*globals(), *__all__})
