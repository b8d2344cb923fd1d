"""What the calls on one target teach for `nodes="auto"`: when costs of passes are measured, and whether they hold."""

from __future__ import annotations

import sys
from collections.abc import Hashable

from selfspec.budget.cost import LARGEST, SECONDS, forget, pass_costs, saved_costs
from selfspec.budget.policy import Auto, Experience, Forecast, unmeasured
from selfspec.core.contract import Drafts
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.utils.machine import crowded

_PASSES, _STALE = 16, 3  # passes of a call that is held against measured costs, and how many times these are too high


class Learned:
    """past: by `_of`, costs of passes and what earlier calls taught; decoded: seconds of all calls so far that compiled
    nothing; due: seconds that `decoded` must reach before the cost of a pass is measured."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.past: dict[Hashable, tuple[list[float], Experience]] = {}
        self.decoded, self.due = 0.0, SECONDS

    def _of(self, rows: int, sampled: bool) -> Hashable:
        return sampled, rows, self.target.engine.name, self.target.rebuilt

    def budget(self, drafter: Drafts, rows: int, sampled: bool, max_new_tokens: int) -> tuple[Drafts, int, Forecast]:
        """Who drafts in a call of so many rows and new tokens, with how many nodes at most, and what it expects. Before
        costs are known, small trees; they are measured once calls have taken as long as that takes, unless other
        programs run beside."""
        if (key := self._of(rows, sampled)) not in self.past:
            which = self.target, rows, sampled
            small = drafter, unmeasured(self.target.device), Forecast(measured=False)
            late = self.target.device.type == "cpu" and crowded()  # measuring would take minutes, and be wrong
            if saved_costs(*which) is None and (self.decoded < self.due or late):
                return small
            costs = pass_costs(*which)
            if saved_costs(*which) is None:  # the machine was busy: again after twice as many calls
                self.decoded, self.due = 0.0, 2 * self.due
                return small
            self.past[key] = costs, Experience()
        (costs, past), forecast = self.past[key], Forecast()
        return Auto(drafter, costs, past, forecast, max_new_tokens), LARGEST, forecast

    def add_call(self, stats: Stats) -> None:
        """A call is over."""
        self.decoded += 0 if stats.compiled else stats.seconds

    def drop_stale_costs(self, stats: Stats, rows: int, sampled: bool) -> None:
        """Drop measured costs that the passes of a call are far below. A machine that is busy throughout makes all
        costs too high by the same factor, so that the costs alone look plausible."""
        known = self.past.get(key := self._of(rows, sampled))
        if known is None or stats.compiled or stats.calls < _PASSES:
            return
        if _STALE * stats.seconds_target < stats.calls * known[0][0]:
            print("auto: passes take a third of what was measured or less; it is measured again", file=sys.stderr)
            forget(self.target, rows, sampled)
            self.past.pop(key, None)  # another thread may have
