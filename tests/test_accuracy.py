"""The accuracy figures of the README hold (pytest -s prints the table, as `python tests/accuracy.py` does)."""
import pytest

import accuracy


@pytest.fixture(scope="module")
def found(dce):
    figures = accuracy.figures(dce)
    print("\n" + accuracy.table(figures))
    return figures


def test_within_the_bounds(found):
    assert len(found) == 15
    for figure in found:
        assert figure.ours <= figure.bound, figure


def test_never_worse_than_torch(found):
    compared = [f for f in found if f.torchs is not None]
    assert len(compared) == 13
    for figure in compared:
        assert figure.ours <= figure.torchs, figure
