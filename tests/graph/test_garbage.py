"""Garbage is collected again after a block that keeps it, and only where it was before."""

import gc

import pytest

from burnish.graph import garbage_kept


def test_is_collected_again_behind_the_block():
    with garbage_kept():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_is_collected_again_after_an_error():
    @garbage_kept()
    def fail():
        assert not gc.isenabled()
        raise ValueError("here")

    for _ in range(2):
        with pytest.raises(ValueError, match="here"):
            fail()
        assert gc.isenabled()


def test_stays_uncollected_where_it_was():
    gc.disable()
    try:
        with garbage_kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
