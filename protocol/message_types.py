"""The module of each message type, by its name on the wire, for programs that import only the types they use.

``requests`` has all types, but importing it takes longer than a ping. A test compares the two.
"""

from __future__ import annotations

import importlib
from typing import Final

from kvferry.protocol.base import Body
from kvferry.protocol.errors import UnknownTypeError

_PACKAGE: Final = "kvferry.protocol"

_REQUESTS: Final = {
    "session_messages": ("HELLO", "PING", "STATUS", "OPEN_EVENTS"),
    "pool_messages": ("CREATE_POOL", "ATTACH_POOL", "REGISTER_POOL", "DELETE_POOL", "ALLOCATE", "FREE"),
    "table_messages": ("CREATE_TABLES", "UPDATE_TABLES", "DELETE_TABLES"),
    "tier_messages": ("OFFLOAD", "RESTORE", "DROP_SNAPSHOT", "SNAPSHOTS", "CANCEL_OPERATION"),
    "cache_messages": (
        "LOOKUP", "LOAD", "STORE", "UNPIN", "CACHE_LIST", "CACHE_PIN", "CACHE_EVICT", "CACHE_EVENTS",
    ),
    "transfer_messages": ("SEND", "RECEIVE", "CANCEL", "ABANDON", "RESULT"),
    "batch_messages": ("BATCH",),
}  # fmt: skip
_FROM_DAEMON: Final = {
    "refusals": ("ERROR", "BUSY"),
    "session_messages": ("WELCOME", "PONG", "STATUS_REPORT", "EVENTS_OPENED"),
    "pool_messages": ("POOL_CREATED", "POOL_ATTACHED", "POOL_REGISTERED", "POOL_DELETED", "ALLOCATED", "FREED"),
    "table_messages": ("TABLES_CREATED", "TABLES_UPDATED", "TABLES_DELETED"),
    "tier_messages": (
        "OFFLOADING", "OPERATION_STARTED", "SNAPSHOT_DROPPED", "SNAPSHOT_REPORT", "OPERATION_CANCELLED", "TIER_DONE",
    ),
    "cache_messages": ("FOUND", "UNPINNED", "CACHE_LISTED", "CACHE_PINNED", "CACHE_EVICTED", "CACHE_CHANGES"),
    "transfer_messages": ("ACCEPTED", "CANCELLED", "ABANDONED", "TRANSFER_RESULT"),
    "batch_messages": ("BATCHED",),
    "events": ("MATCHED", "FINISHED", "SETTLED"),
}  # fmt: skip

REQUESTS: Final = {name: module for module, names in _REQUESTS.items() for name in names}
FROM_DAEMON: Final = {name: module for module, names in _FROM_DAEMON.items() for name in names}
WITHOUT_SESSION: Final = frozenset({"HELLO", "PING", "STATUS"})
"""The requests that need no session."""


def request_type(name: str) -> type[Body]:
    """Return the body type of the request of that name; imports its module.

    Raises:
        UnknownTypeError: there is no such request.
    """
    if name not in REQUESTS:
        raise UnknownTypeError(f"no request type {name!r}; known: {', '.join(REQUESTS)}", field="type")
    return _body(REQUESTS[name], name)


def type_from_daemon(name: str) -> type[Body]:
    """Return the body type of the reply or event of that name; imports its module.

    Raises:
        UnknownTypeError: there is no such reply or event.
    """
    if name not in FROM_DAEMON:
        raise UnknownTypeError(f"no reply or event of type {name[:64]!r}", field="type")
    return _body(FROM_DAEMON[name], name)


def _body(module: str, name: str) -> type[Body]:
    kinds = vars(importlib.import_module(f"{_PACKAGE}.{module}")).values()
    bodies = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Body))
    return next(kind for kind in bodies if kind.__struct_config__.tag == name)
