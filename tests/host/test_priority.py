"""Urgent work before other work, fair shares while the engine runs, and deadlines: the scheduler's side of them."""

from __future__ import annotations

import pytest

from jaxserve.request import FinishReason
from tests.host.driver import Driver, make_limits

BATCH = 10


def make_driver(**limits: int) -> Driver:
    return Driver(make_limits(**limits))


class TestUrgentWork:
    def test_it_takes_a_slot_from_the_youngest_of_the_least_urgent(self) -> None:
        driver = make_driver(max_seqs=3)
        older, younger = driver.add("a", priority=BATCH), driver.add("b", priority=BATCH)
        driver.add("c", priority=5)
        driver.step()
        driver.add("d")
        rows = driver.plan()
        assert [row for row in rows if rows[row].fresh] == ["s3"]
        assert (older.num_preemptions, younger.num_preemptions) == (0, 1)
        driver.commit()
        assert {name: events[-1].num_output for name, events in driver.run().items()} == dict.fromkeys("abcd", 60)

    def test_its_rows_come_first_and_so_does_its_claim_on_the_budget(self) -> None:
        driver = make_driver(max_step_tokens=16)
        driver.add("a", 40, priority=BATCH)
        driver.step()
        driver.add("b", 20)
        assert {name: row.count for name, row in driver.plan().items()} == {"s1": 16}
        driver.commit()
        assert {name: row.count for name, row in driver.plan().items()} == {"s1": 4, "s0": 12}

    def test_it_takes_pages(self) -> None:
        driver = make_driver(num_pages=10)
        batch = driver.add("a", 24, priority=BATCH)
        driver.step()
        driver.step()
        driver.add("b", 16)
        assert list(driver.plan()) == ["s1"]
        assert batch.num_preemptions == 1

    def test_nothing_is_preempted_when_it_would_not_be_enough(self) -> None:
        driver = make_driver(num_pages=10)
        driver.add("urgent", 20)
        batch = driver.add("batch", 4, priority=BATCH)
        driver.step()
        driver.step()
        driver.add("big", 32)
        driver.step()
        assert batch.num_preemptions == 0

    def test_its_equals_keep_what_they_have(self) -> None:
        driver = make_driver(max_seqs=2)
        running = [driver.add("a"), driver.add("b")]
        driver.step()
        driver.add("c")
        driver.step()
        assert [seq.num_preemptions for seq in running] == [0, 0]

    def test_less_urgent_work_waits_while_any_other_does(self) -> None:
        driver = make_driver(num_pages=10)
        driver.add("a", 20)
        driver.step()
        driver.step()
        driver.add("b", 32)  # has to wait for pages that a holds
        driver.add("c", 1, priority=BATCH)
        driver.step()
        assert driver.scheduler.num_waiting == 2

    def test_a_full_house_of_decodes_leaves_it_a_token_at_least(self) -> None:
        driver = make_driver(max_seqs=4, max_step_tokens=4)
        for name in "abcd":
            driver.add(name, 1, priority=BATCH)
        driver.step()
        driver.add("e", 8)
        assert driver.plan()["s4"].count == 1


class TestShares:
    @pytest.mark.parametrize(("weights", "shares"), [((1.0, 1.0), (0.5, 0.5)), ((3.0, 1.0), (0.75, 0.25))])
    def test_a_flood_gets_no_more_than_its_weight(self, weights: tuple[float, float], shares: tuple[float, float]) -> None:
        """100 requests came before the other tenant's first, and each of them is twice as long."""
        driver = make_driver(max_seqs=4, num_pages=32)
        for number in range(100):
            driver.add(f"flood-{number}", 16, tenant="flood", weight=weights[0], max_tokens=16)
        driver.step()
        for number in range(100):
            driver.add(f"other-{number}", 8, tenant="other", weight=weights[1], max_tokens=8)
        served = {"flood": 0, "other": 0}
        for _ in range(250):
            driver.plan()
            for row in driver.in_flight[0][0].rows:
                served["flood" if row.seq_id < 100 else "other"] += row.count
            driver.commit()
        assert driver.scheduler.num_waiting > 50, "both must have had something waiting all along"
        total = sum(served.values())
        assert served["flood"] / total == pytest.approx(shares[0], abs=0.04)
        assert served["other"] / total == pytest.approx(shares[1], abs=0.04)

    def test_a_replay_after_a_preemption_is_not_charged_again(self) -> None:
        driver = make_driver(max_seqs=1)
        seq = driver.add("a", 8, tenant="t", priority=BATCH)
        driver.step()
        driver.step()
        assert seq.charged == 9
        driver.add("b", 1, max_tokens=1)
        driver.step()
        driver.step()
        assert (seq.num_preemptions, seq.planned, seq.charged) == (1, 10, 10)
        assert driver.scheduler._waiting._levels[BATCH].fresh._tenants["t"].start == 10


class TestDeadlines:
    def test_a_waiting_and_a_running_one_end_at_their_time_and_free_what_they_hold(self) -> None:
        driver = make_driver(max_seqs=1)
        driver.add("runs", deadline=5.0)
        driver.step()
        driver.add("waits", deadline=3.0)
        driver.add("patient")
        driver.step()
        assert driver.expire(2.9) == []
        (event,) = driver.expire(3.0)
        assert (event.request_id, event.finish_reason, event.num_output) == ("waits", FinishReason.TIMEOUT, 0)
        (event,) = driver.expire(100.0)
        assert (event.request_id, event.finish_reason, event.num_output) == ("runs", FinishReason.TIMEOUT, 2)
        assert driver.scheduler.num_free_pages == driver.limits.num_pages
        assert list(driver.run()) == ["patient"]

    def test_rows_in_flight_of_an_expired_one_give_nothing(self) -> None:
        driver = make_driver()
        driver.add("a", deadline=1.0)
        driver.plan()
        driver.plan()
        assert len(driver.expire(1.0)) == 1
        assert driver.commit() == driver.commit() == []

    def test_one_that_finished_in_time_does_not_expire(self) -> None:
        driver = make_driver()
        for number in range(20):
            driver.add(str(number), deadline=5.0, max_tokens=2)
        driver.run()
        assert driver.expire(9.0) == []
        assert len(driver.scheduler._expiring) == 0

    def test_the_earliest_runs_first(self) -> None:
        driver = make_driver(max_seqs=1)
        for name, deadline in [("a", None), ("b", 50.0), ("c", 40.0)]:
            driver.add(name, deadline=deadline, max_tokens=1)
        assert list(driver.run()) == ["c", "b", "a"]
