"""Compares greedy outputs of two runs, where rounding may decide between two tokens that are as likely as each other.

Products over other shapes add in another order, so logits differ in their last bits. Where two outputs part, the two
tokens must be the two most likely ones in both runs, and nearly equally so; anything else is an error. What follows such a
place is not compared, and how many there may be is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.real_engines import Output


def assert_same_or_near_tie(expected: Output, found: Output, *, tolerance: float, what: str = "output") -> bool:
    """Whether the two part at a near-tie. Both need `logprobs` of at least 2 a token.

    Args:
        tolerance: gap in logits between the two most likely tokens, under which they count as tied.
    """
    assert found.finish_reason == expected.finish_reason, f"{what}: ended by {found.finish_reason}"
    pairs = zip(expected.tokens, found.tokens, strict=True)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return False
    tokens = {expected.tokens[first], found.tokens[first]}
    for name, output in (("expected", expected), ("found", found)):
        (best, high), (runner_up, low) = output.logprobs[first].top[:2]
        assert output.tokens[first] == best, f"{what}: token {first} of {name} is not its most likely one"
        assert {best, runner_up} == tokens, f"{what}: token {first} is {tokens}; {name} has {best} and {runner_up} ahead"
        assert high - low < tolerance, f"{what}: token {first} differs at a gap of {high - low:.2e} in {name}, no near-tie"
    return True


def assert_same_outputs(
    expected: Mapping[str, Output], found: Mapping[str, Output], *, tolerance: float, max_near_ties: int
) -> None:
    """Every output of `found` is that of `expected`, but for at most `max_near_ties` that part at a near-tie."""
    assert found.keys() == expected.keys()
    parted = [
        key
        for key in expected
        if assert_same_or_near_tie(expected[key], found[key], tolerance=tolerance, what=f"request {key}")
    ]
    assert len(parted) <= max_near_ties, f"too many near-ties to mean anything: requests {parted}"
