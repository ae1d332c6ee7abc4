import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.host.pages import PagePool


def test_every_page_is_given_out_once():
    pool = PagePool(5)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocating_nothing_takes_nothing():
    pool = PagePool(2)
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_more_pages_than_are_free_is_refused_and_changes_nothing():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    pool.check_integrity([])


def test_the_page_freed_last_is_used_first():
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.release(pages[1:2])
    assert pool.allocate(1) == pages[1:2]


def test_a_retained_page_is_free_only_after_both_releases():
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 0
    pool.check_integrity([pages])
    pool.release(pages)
    assert pool.num_free == 1


def test_releasing_a_free_page_fails():
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="page 0 is released, yet nobody references it"):
        pool.release(pages)


def test_retaining_a_free_page_fails():
    with pytest.raises(AssertionError, match="page 0 is free"):
        PagePool(1).retain([0])


def test_integrity_finds_a_leak_and_a_wrong_share():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    with pytest.raises(AssertionError, match="block tables name"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="block tables name"):
        pool.check_integrity([pages, pages[:1]])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 6))))
def test_counts_agree_with_tables_after_any_history(operations):
    pool = PagePool(6)
    tables = []
    for name, number in operations:
        if name == "allocate" and number <= pool.num_free:
            tables.append(pool.allocate(number))
        elif name != "allocate" and tables:
            table = tables[number % len(tables)]
            if name == "retain":
                pool.retain(table)
                tables.append(list(table))
            else:
                pool.release(table)
                tables.remove(table)
        pool.check_integrity(tables)
