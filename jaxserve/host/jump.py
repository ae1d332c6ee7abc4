"""Jump-forward: tokens that a constraint forces are taken as known, and not sampled one step at a time.

Owns the choice of who jumps how far. A sequence whose next tokens are all forced gets them at once, and its next row computes
all of them. That saves a step for each, and makes the next step longer: it pays where the step has places left, or where the
next larger one costs less than what is saved.

Knows steps by their sizes only, and neither plans nor results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxserve.host.rows import take_token
from jaxserve.request import FinishReason, TokenEvent
from jaxserve.request import Sequence as Live

FIXED_PLACES = 8
"""A step of b rows takes about as long as b + 8 such places would, or a little less: 21, 33 and 59 ms for 1, 8 and 32 rows of
the demo model on CPU. On devices where weights bound a step, more places cost less, and jumping would pay more often."""


class JumpForward:
    """The rule for steps that come in `sizes`: how many rows of one token each has room for."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = sorted(sizes)

    def room(self, num_rows: int, wanted: int) -> int:
        """Of `wanted` tokens more than `num_rows`, one each, how many should go into the next step."""
        larger = [size for size in self._sizes if size >= num_rows]
        if not larger or num_rows == 0:
            return 0
        base = larger[0]
        best = most = 0
        for size in larger:
            extra = min(wanted, size - num_rows)
            # In places times rows: what that many tokens take in steps as this one, less what the larger step takes more.
            saved = extra * (base + FIXED_PLACES) - (size - base) * num_rows
            if saved > most:
                best, most = extra, saved
        return best

    def extend(self, events: dict[Live, TokenEvent], num_rows: int) -> list[tuple[Live, FinishReason]]:
        """Have who can jump, and put their tokens into their events; those that end with that, and why.

        Args:
            events: of sequences that have just got a token, or ended.
            num_rows: rows that the next step has anyway.
        """
        ended: list[tuple[Live, FinishReason]] = []
        if not self._sizes:
            return ended
        for seq, tokens in self.choose([seq for seq, event in events.items() if event.finish_reason is None], num_rows):
            events[seq] = event = take_forced(seq, tokens, events[seq])
            if event.finish_reason is not None:
                ended.append((seq, event.finish_reason))
        return ended

    def choose(self, seqs: Sequence[Live], num_rows: int) -> list[tuple[Live, tuple[int, ...]]]:
        """Who jumps, over which tokens.

        Args:
            seqs: those that have just got a token and go on.
            num_rows: rows that the next step has anyway.
        """
        may_jump = [seq for seq in seqs if seq.matcher is not None and seq.request.params.logprobs is None]
        wishes = [(seq, seq.matcher.forced()) for seq in may_jump if seq.matcher is not None]
        # The first forced token of a sequence with a row in flight is what that row samples: its place is there already.
        extras = [len(forced) - seq.in_flight for seq, forced in wishes]
        left = self.room(num_rows, sum(extra for extra in extras if extra > 0))
        jumps = []
        for (seq, forced), extra in zip(wishes, extras, strict=True):
            taken = min(extra, left)
            if taken > 0:
                jumps.append((seq, forced[: taken + seq.in_flight]))
                left -= taken
        return jumps


def take_forced(seq: Live, tokens: tuple[int, ...], event: TokenEvent) -> TokenEvent:
    """Have `seq` take `tokens`, as far as it goes; the event of what it had got, and of them.

    The token of a row in flight is the first of them. It counts as known from now on; the row's mask leaves it no other.
    """
    assert seq.in_flight <= 1, f"sequence {seq.seq_id} jumps with {seq.in_flight} tokens in flight"
    seq.in_flight = 0
    taken, reason = 0, None
    while reason is None and taken < len(tokens):
        reason = take_token(seq, tokens[taken])
        taken += 1
    return replace(event, tokens=event.tokens + tokens[:taken], finish_reason=reason, num_output=seq.num_output)


NO_JUMPS = JumpForward(())
"""Every token is sampled."""
