"""The table of requests: the name of each on the wire, by the module that has its body.

The body's class says the rest: its reply, whether it needs a session, and whether it may be in a BATCH; see
``RequestBody``. Types are looked up by name, so that programs which must start fast import only what they use;
``envelope`` has all of them. A name is never reused or changed. docs/architecture.md, "Where do I change X?", lists
where a new request goes.
"""

from __future__ import annotations

import importlib
from typing import Final

from kvferry.protocol.base import Body, RequestBody
from kvferry.protocol.errors import InvalidFieldError, UnknownTypeError

BATCH: Final = "BATCH"
_MODULES: Final = {
    "session_messages": ("HELLO", "PING", "STATUS", "VERIFY", "UPGRADE", "DRAIN", "OPEN_EVENTS"),
    "log_messages": ("LOG",),
    "pool_messages": ("CREATE_POOL", "ATTACH_POOL", "REGISTER_POOL", "DELETE_POOL", "ALLOCATE", "FREE", "LIST_OWNED"),
    "table_messages": ("CREATE_TABLES", "UPDATE_TABLES", "DELETE_TABLES"),
    "tier_messages": (
        "OFFLOAD", "RESTORE", "DROP_SNAPSHOT", "SNAPSHOTS", "CANCEL_OPERATION",
        "LOOKUP", "LOAD", "STORE", "UNPIN", "CACHE_LIST", "CACHE_PIN", "CACHE_EVICT", "CACHE_EVENTS",
    ),
    "transfer_messages": ("SEND", "RECEIVE", "CANCEL", "ABANDON", "RESULT"),
    "envelope": (BATCH,),
}  # fmt: skip
REQUESTS: Final = {name: module for module, names in _MODULES.items() for name in names}


def tag_of(kind: type[Body]) -> str:
    """Return a body's name on the wire."""
    return str(kind.__struct_config__.tag)


def request_type(name: str) -> type[RequestBody]:
    """Return the body type of the request of that name; imports its module.

    Raises:
        UnknownTypeError: there is no such request.
    """
    if name not in REQUESTS:
        raise UnknownTypeError(f"no request type {name!r}; known: {', '.join(REQUESTS)}", field="type")
    kinds = vars(importlib.import_module(f"kvferry.protocol.{REQUESTS[name]}")).values()
    bodies = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, RequestBody))
    return next(kind for kind in bodies if tag_of(kind) == name)


def check_batched(kind: type[RequestBody], field: str) -> None:
    """Check that a request may be in a BATCH.

    Raises:
        InvalidFieldError: it may not.
    """
    if not kind.in_batch:
        raise InvalidFieldError(f"{tag_of(kind)} cannot be in a BATCH: send it by itself", field=field)
