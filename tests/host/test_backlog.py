from hypothesis import given
from hypothesis import strategies as st

from jaxserve.host.backlog import Backlog, Entry


def make_entry(num_tokens=10, *, priority=0, tenant="a", weight=1.0, since=0.0):
    return Entry(priority=priority, tenant=tenant, weight=weight, num_tokens=num_tokens, since=since)


def ahead(backlog, num_tokens=10, *, priority=0, tenant="a", weight=1.0, served=None):
    return backlog.tokens_ahead(priority, tenant, weight, num_tokens, lambda name: (served or {}).get(name, 0.0))


def test_all_of_the_tenant_itself_and_of_more_urgent_priorities_goes_before():
    backlog = Backlog()
    for number, entry in enumerate(
        [make_entry(100), make_entry(30), make_entry(7, priority=-1, tenant="b"), make_entry(500, priority=1)]
    ):
        backlog.add(str(number), entry)
    assert ahead(backlog) == 137
    assert ahead(backlog, priority=1) == 637
    assert ahead(backlog, priority=-2) == 0
    assert (backlog.requests_ahead(0), backlog.requests_ahead(1), backlog.requests_ahead(-2)) == (3, 4, 0)


def test_of_other_tenants_their_share_goes_before():
    backlog = Backlog()
    backlog.add("flood", make_entry(10_000, tenant="flood"))
    backlog.add("heavy", make_entry(10_000, tenant="heavy", weight=3.0))
    backlog.add("little", make_entry(2, tenant="little"))
    backlog.add("own", make_entry(40))
    assert ahead(backlog) == 40 + 50 + 150 + 2
    assert ahead(backlog, weight=2.0) == 40 + 25 + 75 + 2


def test_who_was_served_less_lately_goes_first():
    backlog = Backlog()
    backlog.add("flood", make_entry(10_000, tenant="flood"))
    assert ahead(backlog, served={"flood": 1000.0}) == 0
    assert ahead(backlog, served={"flood": 1000.0, "a": 995.0}) == 5
    assert ahead(backlog, served={"a": 995.0}) == 1005


def test_the_oldest_is_the_first_that_still_waits():
    backlog = Backlog()
    assert backlog.oldest is None
    for number in range(5):
        backlog.add(str(number), make_entry(since=float(number)))
    backlog.remove("3")
    backlog.remove("0")
    assert backlog.oldest == 1.0
    assert backlog.remove("0") is None


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 50))))
def test_sums_hold_whatever_comes_and_goes(operations):
    backlog = Backlog()
    entries = {}
    for number, tenant, priority, num_tokens in operations:
        name = str(number)
        if name in entries:
            assert backlog.remove(name) is entries.pop(name)
        else:
            entries[name] = make_entry(num_tokens, priority=priority, tenant=tenant)
            backlog.add(name, entries[name])
        backlog.check_integrity()
        assert len(backlog) == len(entries)
        assert backlog.num_tokens == sum(entry.num_tokens for entry in entries.values())
        mine = [entry for entry in entries.values() if entry.tenant == "a"]
        assert backlog.of_tenant("a") == (len(mine), sum(entry.num_tokens for entry in mine))
