"""What may stand for what: every part of an identity is part of a namespace."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.pools.tiers.cached_block import Namespace, identity_of
from kvferry.protocol.ids import ModelIdentity

MODEL = ModelIdentity(name="some/model", revision="1", adapter="sql", salt="pepper")
FORM = "0f" * 16


def test_one_identity_is_one_namespace() -> None:
    again = ModelIdentity(name="some/model", revision="1", adapter="sql", salt="pepper")
    assert Namespace(7, FORM, identity_of(MODEL), "main", 4) == Namespace(7, FORM, identity_of(again), "main", 4)


@pytest.mark.parametrize("field", ModelIdentity.__struct_fields__)
def test_each_field_makes_another(field: str) -> None:
    other = msgspec.structs.replace(MODEL, **{field: "other"})
    assert identity_of(other) != identity_of(MODEL)
    assert Namespace(7, FORM, identity_of(other), "main", 4) != Namespace(7, FORM, identity_of(MODEL), "main", 4)


def test_what_stands_in_one_field_is_not_what_stands_in_the_next() -> None:
    said = [ModelIdentity(name="m", revision="x"), ModelIdentity(name="m", adapter="x"), ModelIdentity(name="mx")]
    assert len({identity_of(one) for one in said}) == len(said)


def test_the_tenant_the_form_the_space_and_the_size_make_others() -> None:
    places = [(7, FORM, "main", 4), (8, FORM, "main", 4), (7, "0e" * 16, "main", 4), (7, FORM, "swa", 4)]
    found = {Namespace(tenant, form, identity_of(MODEL), space, pages) for tenant, form, space, pages in places}
    assert len({*found, Namespace(7, FORM, identity_of(MODEL), "main", 5)}) == len(places) + 1


def test_an_identity_is_what_it_was() -> None:
    """Files on disk and names in the store have it: another digest would lose every cache."""
    assert identity_of(MODEL) == "e9fed3a40d2abc32fcdcbbe841e28cfb"


def test_the_salt_is_never_shown() -> None:
    assert "pepper" not in f"{MODEL} {MODEL!r} {MODEL.label} {MODEL.public!r}"
    assert MODEL.public == msgspec.structs.replace(MODEL, salt="")
    assert MODEL.label == "some/model@1+sql"
    assert ModelIdentity(name="m").label == "m"
