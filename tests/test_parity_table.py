"""The stored parity table is about the installed versions and the code as it is, and enough of it holds."""

from tests import tiny
from tests.distributed import sweep

REMEDY = "run `make sweep` and commit docs/parity.md"


def test_the_table_is_current():
    stored, _ = sweep.read_table()
    assert stored == sweep.stamp(), REMEDY


def test_every_decorated_class_is_in_the_table():
    _, held = sweep.read_table()
    assert sorted(held) == sorted(map(tiny.experts_class, tiny.names())), REMEDY


def test_enough_classes_hold():
    _, held = sweep.read_table()
    assert sum(held.values()) >= 48, [name for name, holds in held.items() if not holds]
