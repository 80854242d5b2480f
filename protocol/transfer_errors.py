"""Errors of transfers that a caller is responsible for. Import them from ``errors``, which lists all."""

from __future__ import annotations

from kvferry.protocol.error_base import CallerError


class LengthMismatchError(CallerError):
    """Lengths that must be equal are not."""

    code = "LENGTH_MISMATCH"
    remedy = "give both sides the same number of pages and tokens"


class EmptyPagesError(CallerError):
    """A page list that must not be empty is."""

    code = "EMPTY_PAGES"
    remedy = "list at least one page; omit a transfer that moves nothing"


class UnknownComponentError(CallerError):
    """A component that the pool does not have, or a required one without a list."""

    code = "UNKNOWN_COMPONENT"
    remedy = "give one page list for each component of the pool"


class DuplicateEntryError(CallerError):
    """Two entries with the same (component, role, layer) in one manifest."""

    code = "DUPLICATE_ENTRY"
    remedy = "give each (component, role, layer) one entry"


class UncoveredEntryError(CallerError):
    """A destination entry that no source covers."""

    code = "UNCOVERED_ENTRY"
    remedy = "send it from some source, or make its component optional at the destination"


class GeometryMismatchError(CallerError):
    """Paired entries of different geometry, dtype or format."""

    code = "GEOMETRY_MISMATCH"
    remedy = "create both pools with the same page size, heads, widths, dtype and format"


class ScaleMismatchError(CallerError):
    """Paired entries whose 8-bit elements have different scales."""

    code = "SCALE_MISMATCH"
    remedy = "give both pools the scales of the same checkpoint: equal bytes mean different values under other scales"


class ModelMismatchError(CallerError):
    """Pages of one model were sent to a pool of another."""

    code = "MODEL_MISMATCH"
    remedy = "pair pools of one model, revision and adapter; any_model=true accepts other KV if you know that it fits"


class WindowMismatchError(CallerError):
    """Pages of a window that are required and missing."""

    code = "WINDOW_MISMATCH"
    remedy = "let both sides compute the window at the same sequence length, and keep its pages until they are sent"


class EmptyStateError(CallerError):
    """A window or state of which one side gives pages and the other none."""

    code = "EMPTY_STATE"
    remedy = "give the pages on both sides, or set none=true at the destination for what it does not want"


class HeadsIndivisibleError(CallerError):
    """A number of KV heads and a number of ranks of which neither is a multiple of the other."""

    code = "HEADS_INDIVISIBLE"
    remedy = "choose a tensor-parallel size that divides the KV heads, or is a multiple of them"


class BounceBufferTooSmallError(CallerError):
    """A page of an entry is larger than one bounce buffer."""

    code = "BOUNCE_BUFFER_TOO_SMALL"
    remedy = "increase the bounce buffer size to at least the largest page_bytes, or make the pools' pages smaller"


class PageOverlapError(CallerError):
    """Pages that another SEND of the transfer already covers."""

    code = "PAGE_OVERLAP"
    remedy = "send each logical page of each entry once"


class PageGapError(CallerError):
    """A chunk that does not continue the one before it."""

    code = "PAGE_GAP"
    remedy = "start a chunk at the logical page at which the last one ended, on a page boundary"


class IncompleteError(CallerError):
    """The last SEND leaves required pages uncovered."""

    code = "INCOMPLETE"
    remedy = "send the named pages, or set last=false if more follow"


class UnexpectedSourceError(CallerError):
    """More sources than the transfer's RECEIVE names."""

    code = "UNEXPECTED_SOURCE"
    remedy = "set sources of RECEIVE to the number of pools that send"


class FirstTokenTwiceError(CallerError):
    """A second SEND of a transfer that carries a first token or a payload."""

    code = "FIRST_TOKEN_TWICE"
    remedy = "let one SEND of the transfer carry first_token and payload"


class TransferExistsError(CallerError):
    """The request id is in use by a live transfer or by another tenant."""

    code = "TRANSFER_EXISTS"
    remedy = "wait for the other transfer's SETTLED event, or use a new request id"


class UnknownTransferError(CallerError):
    """No transfer of that request id, side and pool belongs to the session."""

    code = "UNKNOWN_TRANSFER"
    remedy = "results are kept until they are acknowledged; check request_id, pool and side"


class CancelledError(CallerError):
    """Cancelled by its own side."""

    code = "CANCELLED"
