"""Whether KV of one pool may go into another: not where both say whose it is, and it is two models'."""

from __future__ import annotations

from kvferry.protocol.errors import ModelMismatchError
from kvferry.protocol.model_identity import COMPARED, MAY_BE_UNKNOWN, ModelIdentity


def check_models(source: ModelIdentity | None, destination: ModelIdentity | None, sender: str, receiver: str) -> None:
    """Check that two sides are of one model, revision and adapter; who says nothing, or no revision, contradicts none.

    Args:
        source: whose KV it is.
        destination: whose KV is wanted.
        sender: how to call the one in an error.
        receiver: how to call the other.

    Raises:
        ModelMismatchError: both name a model, and it, a revision that both name, or the adapter is not the same.
    """
    if source is None or destination is None:
        return
    for field in COMPARED:
        ours, theirs = getattr(source, field), getattr(destination, field)
        if field in MAY_BE_UNKNOWN and not (ours and theirs):
            continue
        if ours != theirs:
            raise ModelMismatchError(
                f"{sender} holds KV of {source.label}, {receiver} of {destination.label}", field=f"model.{field}"
            )
