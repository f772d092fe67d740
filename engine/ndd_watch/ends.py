"""Where steps of the training end, of one or several optimizers.

`Ends` tells at which steps of optimizers a step of the training ends. With one optimizer, each of its steps does. With
several, the one that steps most rarely ends a step, and of those that step equally often the last one. One that turns
out to step too rarely for that hands over to another, all of whose steps are counted then. Optimizers that take turns,
each for several steps, and those of which one is chosen for each batch, all end steps. Another optimizer that appears
later either joins the others or takes their place: which of them it is shows when one of them steps again.
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
        # The one that ends a step, and those that stepped too rarely for that.
        self._ender = 0
        self._rare: set[int] = set()
        # New ones whose first step may belong to a step that was counted already.
        self._new: list[int] = []
        # Those whose place others have taken, the steps that they had ended, and those that the only one of the others
        # has ended since.
        self._gone: list[int] = []
        self._gone_told = self._alone = 0
        # Since these optimizers train together: steps of each of them, and those of the training.
        self._together: dict[int, int] = {}
        self._told = 0
        # Before that: the one that ended steps, and these steps; how many of the last ones are parts of one step.
        self._earlier = self._earlier_told = 0
        self._parts = 1
        # Steps without each of them, after one with it; whether each of their steps is one of the training, as of
        # optimizers that are chosen at random.
        self._missing: dict[int, int] = {}
        self._apart = False
        self._lengths: set[int] = set()  # of rows, see below
        # The first step of the one that ends them was not counted, but that of another one in its place.
        self._behind = False
        # Steps of each optimizer since the last end, and in the step before that.
        self._since: dict[int, int] = {}
        self._before: dict[int, int] = {}
        # The optimizer that stepped last, its steps in a row, the steps that these have ended, and whether the one
        # before it stepped in a row, too.
        self._last = self._row = self._row_ended = 0
        self._rows = self._turns = False
        self._turned = 0
        # Steps of all optimizers, and how many of them have ended a step; and before the present ones trained together.
        self._all = self._all_before = self._ended = self._ended_before = 0

    @property
    def only(self) -> int:
        """The id of the only optimizer; 0 where there are several."""
        return self._ender if len(self.counts) == 1 and not self._new else 0

    @property
    def batches(self) -> int:
        """Micro-steps of the step that ends, of several optimizers: each takes a batch for each of its own steps."""
        return 1 if self._turns else max(self._before.values(), default=1)

    @property
    def begun(self) -> int:
        """The same of the step that has not ended."""
        return max(self._since.values(), default=0)

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
            self._lengths.add(min(self._row, TURN))
            self._last, self._row, self._row_ended = key, 1, 0
        ended, missed = self._stepped(key)
        self._row_ended += ended + missed
        missed -= wrong
        self._ended += ended + missed
        if self._turns:
            ended, missed = 1, 0
        elif self._rows and self._row >= TURN:
            self._turns, self._turned = True, self._turned + 1
            self._apart |= self._turned >= TURN  # they do so irregularly
            missed += self._all - self._ended
        else:
            return ended, missed
        self._ended = self._all
        return ended, missed

    def _stepped(self, key: int) -> tuple[int, int]:
        counts = self.counts
        if not counts:
            self._ender = key
            counts[key] = self._together[key] = self._alone = self._told = 1
            return 1, 0
        missed = 0
        if key not in counts and key not in self._new:
            if key not in self._gone or self._alone > RARE:
                self._new.append(key)
                # Its only step before was part of the first one of those that seemed to have taken its place.
                return 0, -(key in self._gone and self._gone_told == 1)
            # It was not replaced: the others step several times for one step of this.
            missed -= self._alone
            several = self._alone > 1
            self._begin([*self._gone, *counts], self._gone[-1] if several else next(reversed(counts)))
        elif self._new and key in self._new:
            # It steps again, and none of the earlier ones did: it has taken their place.
            gone, new, told = list(counts), self._new, self._told
            self._begin(new, new[-1])
            self._gone, self._gone_told, self._alone, missed = gone, told, len(new) == 1, 1
            self._ended = self._all - 2  # whatever those before did is right
        elif self._new:
            earlier, told = self._ender, self._told + self._earlier_told
            self._begin([*counts, *self._new], self._new[-1])
            self._earlier, self._earlier_told = earlier, told
            self._behind = True
        counts = self.counts
        counts[key] += 1
        self._together[key] += 1
        if len(counts) == 1:
            self._alone += 1
            self._told += 1
            return 1, missed
        if self._apart:
            return 1, missed
        first = not self._since
        self._since[key] = self._since.get(key, 0) + 1
        if first or (self._since[key] > RARE and key != self._ender):
            missed += self._judge(key)
        if key != self._ender:
            return 0, missed
        self._told += 1
        if self._told <= RARE and self._earlier_told:
            # The last of the earlier steps were parts of the first one that these optimizers have ended together.
            parts = self._since.get(self._earlier, 0)
            if self._parts < parts <= self._earlier_told:
                missed -= parts - self._parts
                self._parts = parts
        for one in self._before:
            if one not in self._since:
                self._missing[one] = self._missing.get(one, 0) + 1
        self._before, self._since = self._since, {}
        if counts[key] >= MOST_COUNTED:
            self.counts = {one: count // 2 for one, count in counts.items()}
        others = [one for one in counts if one != key and one not in self._rare]
        if self._told >= MOST_COUNTED // 2 and others and len(self._lengths) == TURN:
            self._apart = all(5 * self._missing.get(one, 0) > self._told for one in others)
            if self._apart:
                missed = self._all - self._all_before - 1 - (self._ended - self._ended_before)
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

    def _begin(self, keys: list[int], ender: int) -> None:
        """These optimizers train from now on."""
        self.counts, self._together = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
        self._ender, self._rare = ender, set()
        self._all_before, self._ended_before = self._all - 1 - len(self._new), self._ended
        self._alone = self._told = self._gone_told = self._earlier = self._earlier_told = 0
        self._parts, self._missing, self._apart, self._lengths = 1, {}, False, set()
        self._new, self._gone, self._since, self._before = [], [], {}, {}
        self._behind = False

    def _judge(self, key: int) -> int:
        """See which optimizer ends steps. Returns how many steps were not counted, if it is another one from now on."""
        overdue = self._since[key] > RARE
        recent = self._since if overdue else {**self._before, **self._since}
        live = {one: count for one, count in self.counts.items() if one in recent}
        most = max(live.values())
        if most <= RARE:  # too few steps tell nothing about their frequency
            return 0
        often = {
            one: count
            for one, count in live.items()
            if (4 * count >= 3 * most if one in self._rare else (count + 1) * RARE >= most)
        }
        # In the middle of a step, equally frequent optimizers differ by one.
        rarest = [one for one, count in often.items() if count <= min(often.values()) + 1]
        if self._ender in rarest and not overdue:
            return 0
        ender, self._ender = self._ender, rarest[-1]
        self._rare.add(ender)
        self._rare.discard(self._ender)
        # All of its steps since they train together are steps of the training, but this one, which is counted apart.
        missed = max(self._together[self._ender] - (key == self._ender) - self._told, 0)
        self._told += missed
        missed += self._parts - 1
        self._parts, self._earlier = 1, 0
        return missed
