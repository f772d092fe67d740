"""Tells at which steps of optimizers a step of the training ends.

With one optimizer, each of its steps does. With several, the one that steps most rarely ends a step, and of those that
step equally often the last one. Optimizers that take turns, each for several steps, all end steps. Another optimizer
that appears later either joins the others or takes their place: which of them it is shows when one of them steps again.
"""

from __future__ import annotations

# An optimizer that steps more rarely than this times the most frequent one does not end steps.
RARE = 8
# Steps in a row of each of two optimizers, from which on they take turns.
TURN = 3
# Counts are halved here, so that they follow a change.
MOST_COUNTED = 64


class Ends:
    """Of one thread. Optimizers are known by their id, so that none is kept.

    counts: recent steps of each optimizer, in the order of their first ones.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        # The one that ends a step.
        self._ender = 0
        # New ones whose first step may belong to a step that was counted already.
        self._new: list[int] = []
        # Those whose place others have taken, and how many steps these have ended since.
        self._gone: list[int] = []
        self._alone = 0
        # The first step of the one that ends them was not counted, but that of another one in its place.
        self._behind = False
        # Steps of each optimizer since the last end, and in the step before that.
        self._since: dict[int, int] = {}
        self._before: dict[int, int] = {}
        # The optimizer that stepped last, its steps in a row, the steps that these have ended, and whether the one
        # before it stepped in a row, too.
        self._last = self._row = self._row_ended = 0
        self._rows = self._turns = False
        # Steps of all optimizers, and how many of them have ended a step.
        self._all = self._ended = 0

    @property
    def only(self) -> int:
        """The id of the only optimizer; 0 where there are several."""
        return self._ender if len(self.counts) == 1 and not self._new else 0

    def stepped(self, key: int) -> tuple[int, int]:
        """An optimizer has stepped: (steps that end now: 0 or 1; what has to be added to those counted before)."""
        self._all += 1
        wrong = 0
        if key == self._last:
            self._row += 1
        else:
            self._rows = self._row >= TURN
            if self._turns and not self._rows:  # the last row was no turn, but part of a step
                self._turns, wrong = False, self._row - self._row_ended
            self._last, self._row, self._row_ended = key, 1, 0
        ended, missed = self._stepped(key)
        self._row_ended += ended + missed
        missed -= wrong
        self._ended += ended + missed
        if self._turns:
            ended, missed = 1, 0
        elif self._rows and self._row >= TURN:
            self._turns = True
            missed += self._all - self._ended
        else:
            return ended, missed
        self._ended = self._all
        return ended, missed

    def _stepped(self, key: int) -> tuple[int, int]:
        counts = self.counts
        if not counts:
            self._ender = key
            counts[key] = self._alone = 1
            return 1, 0
        missed = 0
        if key not in counts and key not in self._new:
            if key not in self._gone or self._alone > RARE:
                self._new.append(key)
                return 0, 0
            # It was not replaced: the others step several times for one step of this.
            missed -= self._alone
            several = self._alone > 1
            self._begin([*self._gone, *counts], self._gone[-1] if several else next(reversed(counts)))
        elif self._new and key in self._new:
            # It steps again, and none of the earlier ones did: it has taken their place.
            gone, new = list(counts), self._new
            self._begin(new, new[-1])
            self._gone, self._alone, missed = gone, len(new) == 1, 1
            self._ended = self._all - 2  # whatever those before did is right
        elif self._new:
            self._begin([*counts, *self._new], self._new[-1], self._alone)
            self._behind = True
        counts = self.counts
        counts[key] += 1
        if len(counts) == 1:
            self._alone += 1
            return 1, missed
        first = not self._since
        self._since[key] = self._since.get(key, 0) + 1
        if first or (self._since[key] > RARE and key != self._ender):
            missed += self._judge(key)
        if key != self._ender:
            return 0, missed
        if self._alone:
            # The last of the first steps, all of which were counted, were those of one step.
            ratio = max((count for one, count in self._since.items() if one != key), default=0)
            if 1 < ratio <= self._alone:
                missed -= ratio - 1
            self._alone = 0
        self._before, self._since = self._since, {}
        if counts[key] >= MOST_COUNTED:
            self.counts = {one: count // 2 for one, count in counts.items()}
        return 1, missed

    def renew(self, key: int) -> int:
        """The optimizers so far do not exist any more, and this one trains. Returns the steps that were not counted."""
        missed = len(self._new) if self.counts else 0
        self._begin([key], key)
        self._ended = self._all
        return missed

    def finished(self) -> int:
        """The training has ended: steps that were not counted, since it did not show where they end."""
        others = {one: count for one, count in self._before.items() if one != self._ender}
        whole = bool(others) and all(self._since.get(one, 0) >= count for one, count in others.items())
        missed = len(self._new) + (whole and self._behind)
        self._new, self._since = [], {}
        return missed

    def _begin(self, keys: list[int], ender: int, alone: int = 0) -> None:
        """These optimizers train from now on."""
        self.counts = dict.fromkeys(keys, 0)
        self._ender, self._alone = ender, alone
        self._new, self._gone, self._since, self._before = [], [], {}, {}
        self._behind = False

    def _judge(self, key: int) -> int:
        """See which optimizer ends steps. Returns how many steps have ended since the last one that was counted."""
        overdue = self._since[key] > RARE
        recent = self._since if overdue else {**self._before, **self._since}
        live = {one: count for one, count in self.counts.items() if one in recent}
        most = max(live.values())
        if most <= RARE:  # too few steps tell nothing about their frequency
            return 0
        often = {one: count for one, count in live.items() if count * RARE >= most}
        # In the middle of a step, equally frequent optimizers differ by one.
        rarest = [one for one, count in often.items() if count <= min(often.values()) + 1]
        if self._ender in rarest and not overdue:
            return 0
        self._ender = rarest[-1]
        self._alone = 0
        return max(self._since.get(self._ender, 0) - 1, 0)
