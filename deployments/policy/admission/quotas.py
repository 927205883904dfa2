"""What each API key has used of its limits: requests and tokens of the last minute. Pure.

A minute slides. What is counted is counted for 60 s, and for up to a second more, as it is kept in sums of whole
seconds. So in no 60 s more is let through than the limit. A token bucket would let up to twice as much through in its
first minute.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from deployments.messages import Admit, Allowance, Quota, Reject, SessionRequest

MINUTE_S = 60
REQUESTS, TOKENS = "requests_per_minute", "tokens_per_minute"
"""The codes of refusals."""
ABANDONED = "abandoned"
"""The outcome of a placement whose caller never learnt of it. It is not counted."""


@dataclass(slots=True)
class Slot:
    """What was counted in one second, from `second` on. `is_over`: it counts no more."""

    second: int
    amount: int = 0
    is_over: bool = False


class Minute:
    """The sum of the last 60 s. What a call costs does not grow with how much was counted."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque()
        self._sum = 0

    def used(self, now_s: float) -> int:
        """The sum."""
        while self._slots and self._slots[0].second + 1 + MINUTE_S <= now_s:
            slot = self._slots.popleft()
            slot.is_over = True
            self._sum -= slot.amount
        return self._sum

    def wait_s(self, amount: int, limit: int, now_s: float) -> float:
        """Seconds until `amount` more fits into `limit`; 0 where it does now.

        An amount over the limit fits into an empty minute. Otherwise it could never be used.
        """
        over = self.used(now_s) + min(amount, limit) - limit
        if over <= 0:
            return 0.0
        for slot in self._slots:
            over -= slot.amount
            if over <= 0:
                return slot.second + 1 + MINUTE_S - now_s
        raise AssertionError("the sum is more than its parts")

    def reset_s(self, now_s: float) -> float:
        """Seconds until nothing is counted."""
        self.used(now_s)
        last = next((slot.second for slot in reversed(self._slots) if slot.amount), None)
        return 0.0 if last is None else last + 1 + MINUTE_S - now_s

    def add(self, amount: int, now_s: float) -> Slot:
        """Count it. Returns where, for `give_back`."""
        self.used(now_s)
        if not self._slots or self._slots[-1].second != int(now_s):
            self._slots.append(Slot(int(now_s)))
        self._slots[-1].amount += amount
        self._sum += amount
        return self._slots[-1]

    def give_back(self, slot: Slot, amount: int) -> None:
        """So much of what was counted there was not used. What is older than a minute counts no more anyway."""
        if not slot.is_over:
            slot.amount -= amount
            self._sum -= amount


@dataclass(slots=True)
class Books:
    """What one key has used."""

    requests: Minute = field(default_factory=Minute)
    tokens: Minute = field(default_factory=Minute)

    def left(self, quota: Quota, now_s: float) -> Allowance:
        """What is left of each limit."""
        requests, tokens = (
            (max(limit - minute.used(now_s), 0), minute.reset_s(now_s)) if limit else (0, 0.0)
            for minute, limit in ((self.requests, quota.requests), (self.tokens, quota.tokens))
        )
        return Allowance(*requests, *tokens)


@dataclass(frozen=True, slots=True)
class Charge:
    """What one placement counts as. `prompt_tokens`: of `tokens`, those that are used when it begins."""

    books: Books
    quota: Quota
    tokens: int
    prompt_tokens: int
    counted: Slot
    request: Slot | None

    def settle(self, output_tokens: int, now_s: float) -> None:
        """The placement is over, after so many tokens of the answer."""
        unused = self.tokens - self.prompt_tokens - output_tokens
        if unused >= 0:
            self.books.tokens.give_back(self.counted, unused)
        else:  # it was over the limit alone, and the limit was counted
            self.books.tokens.add(-unused, now_s)

    def cancel(self) -> None:
        """It was never placed."""
        self.books.tokens.give_back(self.counted, self.tokens)
        if self.request is not None:
            self.books.requests.give_back(self.request, 1)


class Quotas:
    """The books of all keys, by name, and what the open sessions count as.

    When a session asks for a place, its prompt and the longest answer that it may have are counted. What of that is not
    used is given back when it is over. What is never placed is not counted. A request that has more than one answer is
    let through or refused with the first of them.
    """

    def __init__(self) -> None:
        self._books: dict[str, Books] = {}
        self._asked: dict[str, Charge] = {}
        self._placed: dict[str, dict[int, Charge]] = {}

    def open(self, request: SessionRequest, now_s: float) -> Reject | None:
        """Count a session that asks for a place, or refuse it."""
        quota = request.quota
        if quota is None or request.session_id in self._asked:
            return None
        books = self._books.setdefault(quota.key, Books())
        prompt_tokens = request.prompt_tokens if request.attempt == 1 else 0  # it was counted with the first one
        tokens = prompt_tokens + request.max_tokens
        if quota.answers and (refusal := _refusal(books, quota, tokens, now_s)):
            return replace(refusal, allowance=books.left(quota, now_s))
        if quota.tokens:
            tokens = min(tokens, quota.tokens)
        counted = books.tokens.add(tokens, now_s)
        first = books.requests.add(1, now_s) if quota.answers else None
        self._asked[request.session_id] = Charge(books, quota, tokens, prompt_tokens, counted, first)
        return None

    def decided(self, session_id: str, decision: Admit | Reject, now_s: float) -> Admit | Reject:
        """A session has a place, or is refused. Returns the decision with what its key has left, if it has limits."""
        charge = self._asked.pop(session_id, None)
        if charge is None:
            return decision
        if isinstance(decision, Admit):
            self._placed.setdefault(session_id, {})[decision.placement.epoch] = charge
        else:
            charge.cancel()
        return replace(decision, allowance=charge.books.left(charge.quota, now_s))

    def closed(self, session_id: str, epoch: int, outcome: str, output_tokens: int | None, now_s: float) -> None:
        """A placement is over; idempotent. `output_tokens`: None where it is not known: all of it stays counted."""
        placed = self._placed.get(session_id)
        if placed is None or (charge := placed.pop(epoch, None)) is None:
            return
        if not placed:
            del self._placed[session_id]
        if outcome == ABANDONED:
            charge.cancel()
        elif output_tokens is not None:
            charge.settle(output_tokens, now_s)

    def withdrawn(self, session_id: str) -> None:
        """The caller never learnt where the session was placed, or does not wait for it any more; idempotent."""
        for charge in self._placed.pop(session_id, {}).values():
            charge.cancel()
        if (asked := self._asked.pop(session_id, None)) is not None:
            asked.cancel()

    def describe(self, now_s: float) -> dict[str, dict[str, int]]:
        """What each key that has a limit has used of the last minute."""
        return {
            name: {"requests": books.requests.used(now_s), "tokens": books.tokens.used(now_s)}
            for name, books in self._books.items()
        }


def _refusal(books: Books, quota: Quota, tokens: int, now_s: float) -> Reject | None:
    """Why a request must wait, if it must, until both limits let it through. `tokens`: for each of its answers."""
    wait_s, code, limit = max(
        (minute.wait_s(amount, limit, now_s) if limit else 0.0, code, limit)
        for minute, amount, limit, code in (
            (books.requests, 1, quota.requests, REQUESTS),
            (books.tokens, quota.answers * tokens, quota.tokens, TOKENS),
        )
    )
    if not wait_s:
        return None
    reason = f"the key {quota.key} has {code} {limit}; enough of it is free in {math.ceil(wait_s)} s"
    return Reject(reason, wait_s, code=code)
