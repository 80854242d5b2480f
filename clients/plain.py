"""Requests of a scheduler's step that a look at their fields shows to be valid, for a fraction of what a decoder costs.

Where an engine's caches are cold, as they are after each step of its model, each part of a library that is used costs
what fetching it from memory does, and a comparison next to nothing. What is not plain is left to the protocol's types,
which say what is wrong with it, if anything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, get_args

import msgspec

from kvferry.protocol.base import MAX_PAGE_LISTS, PageList
from kvferry.protocol.ids import MAIN, PeerAddress, PoolName
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES
from kvferry.protocol.pool_messages import Allocate, Free
from kvferry.protocol.tier_messages import HASH_BYTES, MAX_HASHES, Load, Lookup, Offload, Restore, Store
from kvferry.protocol.transfer_messages import MAX_POOLS, Receive, ReceiveInto, Send

SMALL: Final = 1 << 30
"""Counts, pages and tokens below are within every bound of the protocol."""

MOST_NAMES: Final = 256
"""Names and addresses that are remembered as valid."""

FEW_ADDRESSES: Final = 8
MOST_LEASES: Final = 1 << 62
MOST_BLOCK_PAGES: Final = 1024
HEX_DIGITS: Final = "0123456789abcdef"
ID_DIGITS: Final = 32
INTO: Final = get_args(ReceiveInto)

_Unknown: TypeAlias = Any
"""A body whose fields may still be anything."""


def is_plain(body: msgspec.Struct) -> bool:
    """Return whether a body's fields are as its decoder would return them; False where it is to be asked."""
    look = _LOOKS.get(type(body))
    return look is not None and look(body)


def is_send(one: _Unknown) -> bool:
    """Return whether a SEND is plain whose lists are made of ``Pages``."""
    token = one.first_token
    return (
        _is_id(one.request_id)
        and type(one.pool) is str
        and _is_name(one.pool)
        and len(one.lists) <= MAX_PAGE_LISTS
        and (token is None or (type(token) is int and 0 <= token < SMALL))
        and type(one.payload) is bytes
        and len(one.payload) <= LARGEST_PAYLOAD_BYTES
        and type(one.destinations) is int
        and 0 < one.destinations <= MAX_POOLS
        and type(one.steps) is tuple
        and not one.steps
        and type(one.last) is bool
        and type(one.checksums) is bool
    )


def is_receive(one: _Unknown) -> bool:
    """Return whether a RECEIVE is plain whose lists are made of ``Pages``."""
    return (
        _is_id(one.request_id)
        and type(one.pool) is str
        and _is_name(one.pool)
        and len(one.lists) <= MAX_PAGE_LISTS
        and type(one.sources) is int
        and 0 < one.sources <= MAX_POOLS
        and type(one.source_daemons) is tuple
        and (not one.source_daemons or _are_addresses(one.source_daemons))
        and one.after is None
        and type(one.into) is str
        and one.into in INTO
        and type(one.checksums) is bool
    )


def _is_id(value: _Unknown) -> bool:
    return type(value) is str and len(value) == ID_DIGITS and not value.strip(HEX_DIGITS)


def _are_lists(lists: _Unknown) -> bool:
    return type(lists) is tuple and False not in [type(one) is PageList and is_list(one) for one in lists]


def is_list(one: _Unknown) -> bool:
    """Return whether a page list is plain."""
    count, first, tokens = one.pages, one.first_page, one.tokens
    return (
        type(count) is int
        and 0 <= count < SMALL
        and (first is None or (type(first) is int and 0 <= first < SMALL))
        and (tokens is None or (type(tokens) is int and 0 < tokens < SMALL))
        and type(one.component) is str
        and one.component == MAIN
        and type(one.none) is bool
    )


@functools.lru_cache(MOST_NAMES)
def _is_name(name: str) -> bool:
    return _matches(PoolName, name)


def _are_addresses(addresses: Sequence[str]) -> bool:
    return len(addresses) <= FEW_ADDRESSES and False not in [type(one) is str and _is_address(one) for one in addresses]


@functools.lru_cache(MOST_NAMES)
def _is_address(address: str) -> bool:
    return address.isascii() and _matches(PeerAddress, address)  # a lone surrogate cannot be sent


def _matches(kind: Any, value: str) -> bool:  # noqa: ANN401  an annotated type
    """Return whether a text is as its type's ``Meta`` has it."""
    (meta,) = get_args(kind)[1:]
    return len(value) <= meta.max_length and re.search(meta.pattern, value) is not None


def _is_offload(one: _Unknown) -> bool:
    return (
        type(one.pool) is str
        and _is_name(one.pool)
        and _are_lists(one.lists)
        and 0 < len(one.lists) <= MAX_PAGE_LISTS
        and type(one.release) is bool
        and one.after is None
    )


def _is_restore(one: _Unknown) -> bool:
    return (
        _is_id(one.snapshot)
        and type(one.pool) is str
        and _is_name(one.pool)
        and _are_lists(one.lists)
        and len(one.lists) <= MAX_PAGE_LISTS
        and type(one.allocate) is bool
        and type(one.drop) is bool
        and one.after is None
    )


def _is_load(one: _Unknown) -> bool:
    return (
        type(one.pool) is str
        and _is_name(one.pool)
        and type(one.lease) is int
        and 0 < one.lease < MOST_LEASES
        and type(one.pages) is int
        and 0 <= one.pages < SMALL
        and type(one.first_block) is int
        and 0 <= one.first_block < SMALL
        and one.after is None
        and type(one.unpin) is bool
    )


def _is_store(one: _Unknown) -> bool:
    return (
        _is_in_main(one)
        and type(one.hashes) is bytes
        and len(one.hashes) <= MAX_HASHES * HASH_BYTES
        and type(one.pages) is int
        and 0 <= one.pages < SMALL
        and type(one.parent) is bytes
        and len(one.parent) <= HASH_BYTES
        and type(one.block_pages) is int
        and 0 < one.block_pages <= MOST_BLOCK_PAGES
        and one.after is None
    )


def _is_in_main(one: _Unknown) -> bool:
    return type(one.space) is str and one.space == MAIN and type(one.pool) is str and _is_name(one.pool)


def _is_lookup(one: _Unknown) -> bool:
    return (
        _is_in_main(one)
        and type(one.hashes) is bytes
        and len(one.hashes) <= MAX_HASHES * HASH_BYTES
        and type(one.block_pages) is int
        and 0 < one.block_pages <= MOST_BLOCK_PAGES
        and one.lease is None
        and type(one.pin) is bool
    )


def _is_allocate(one: _Unknown) -> bool:
    return _is_in_main(one) and type(one.count) is int and 0 < one.count < SMALL


def _is_free(one: _Unknown) -> bool:
    return _is_in_main(one) and type(one.pages) is int and 0 <= one.pages < SMALL and one.after is None


_LOOKS: Final[dict[type[msgspec.Struct], Callable[[Any], bool]]] = {
    Send: lambda one: _are_lists(one.lists) and is_send(one),
    Receive: lambda one: _are_lists(one.lists) and is_receive(one),
    PageList: is_list,
    Offload: _is_offload,
    Restore: _is_restore,
    Load: _is_load,
    Store: _is_store,
    Lookup: _is_lookup,
    Allocate: _is_allocate,
    Free: _is_free,
}
