"""Check that two pools hold KV of the same model before pages move between them."""

from __future__ import annotations

from kvferry.protocol.errors import ModelMismatchError
from kvferry.protocol.ids import COMPARED, MAY_BE_UNKNOWN, ModelIdentity


def check_models(source: ModelIdentity | None, destination: ModelIdentity | None, sender: str, receiver: str) -> None:
    """Check that source and destination agree on model, revision and adapter.

    A side without a model identity matches any; a revision is compared only where both sides give one.

    Args:
        source: the model identity of the source pool, or None.
        destination: the model identity of the destination pool, or None.
        sender: name of the source in an error.
        receiver: name of the destination in an error.

    Raises:
        ModelMismatchError: model name, adapter, or a revision that both sides give differ.
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
