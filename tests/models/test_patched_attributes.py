"""Attributes that have another value for a while."""

from __future__ import annotations

import pytest

from pathspace.models.isolation import replaced


class Parent:
    kind = "parent"


class Child(Parent):
    own = 1


def test_values_come_back_after_an_error() -> None:
    with pytest.raises(KeyError), replaced((Child, "own", 2), (Child, "kind", "child")):
        assert (Child.own, Child.kind, Parent.kind) == (2, "child", "parent")
        raise KeyError
    assert (Child.own, Child.kind) == (1, "parent")
    assert "kind" not in vars(Child)


def test_replacing_twice_ends_at_the_first_value() -> None:
    with replaced((Child, "own", 2)), replaced((Child, "own", 3)):
        assert Child.own == 3
    assert Child.own == 1


def test_a_missing_attribute_is_refused_before_anything_changes() -> None:
    with (
        pytest.raises(AttributeError, match="has no attribute 'other'"),
        replaced((Child, "own", 2), (Child, "other", 3)),
    ):
        pass
    assert Child.own == 1
