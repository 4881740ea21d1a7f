"""Owns the one fold of the ledger: rows go in, the totals of a run come out, and whatever shows a run reads those.

Rules kept here:
- Rows come in the ledger's order, all at once or in pieces. Within a piece, rows of one feed come together, feed after
  feed in the order of FEEDS; no total depends on more than that. So rows read back and rows just made count alike.
- Of every kind only the columns that count are read. A row has 25 and most are empty: reading all takes three times as
  long.
- Totals mean what the coordinator means: `t` counts published versions, `gradients` those in versions decided on.
- `RunFold` is cheap enough for every simulated task, and its size does not depend on the length of the run: a server
  keeps its `state` in every checkpoint. Parts (`FoldPart`) count what only some readers show, such as `VersionFold`
  what grows with the versions.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, Self

from offbeat.protocol.messages import TOTAL_MAX, AnswerPush, Evaluated, Finish, VersionPublished
from offbeat.storage.ledger import CHATTER, Ledger
from offbeat.storage.row_shapes import NewRow, RowShape
from offbeat.storage.rows import COMMANDS, EVENTS, KINDS, row_maker

SPAN_ROWS = 50_000
"""Rows that one piece covers at most when a ledger is read."""
STALENESS_DIGITS = 4
"""Larger staleness is counted rounded down to so many digits: else the counts would grow with the run."""
COUNTED = tuple(kind for kind in KINDS if kind not in CHATTER)
"""Kinds whose rows are counted: a server forgets its chatter, so totals of that would not survive a restart."""

Rows = Sequence[tuple[Any, ...]]
Select = Callable[[str, tuple[int, int]], Rows]
"""Runs a query with two parameters and gives all rows: `Ledger.select`, for instance."""


class Feed(NamedTuple):
    """Rows of some kinds, and the columns of them that are folded."""

    kinds: tuple[str, ...]
    columns: tuple[str, ...]
    latest_per: tuple[str, ...] = ()
    """Where only the latest row of each is wanted: by these columns."""

    @property
    def query(self) -> str:
        """SQL for the rows after one and up to another."""
        kinds = ", ".join(f"'{kind}'" for kind in self.kinds)
        latest = [name if name in self.latest_per else f"max({name})" for name in self.columns]
        columns = ", ".join(latest if self.latest_per else self.columns)
        order = f"GROUP BY {', '.join(self.latest_per)}" if self.latest_per else "ORDER BY sequence"
        table = "chatter" if set(self.kinds) <= set(CHATTER) else "events"
        return f"SELECT {columns} FROM {table} WHERE kind IN ({kinds}) AND sequence > ? AND sequence <= ? {order}"  # noqa: S608 (text of this file)


def _feed(kinds: str, columns: str, latest_per: str = "") -> Feed:
    return Feed(tuple(kinds.split()), tuple(columns.split()), tuple(latest_per.split()))


FEEDS = {
    "workers": _feed(
        "fleet_joined joined declared left returned bad_update quarantined readmitted busy unknown not_yours repeated",
        "sequence at kind worker device detail samples",
    ),
    "leased": _feed("leased", "sequence at task worker device"),
    "released": _feed("released heard_again", "at task worker granted_at deadline detail kind"),
    "published": _feed("published", "at t"),
    "decided": _feed(
        "decided",
        "t staleness outcome keep new publish gradients decision device worker sequence at task granted_at",
    ),
    "mixed": _feed("mixed", "decision"),
    "heartbeat": _feed("heartbeat", "task worker at", "task"),
    "asked": _feed("requested request_ended", "kind worker sequence at", "kind worker"),
    "evaluated": _feed("evaluated", "sequence at t detail"),
    "lost": _feed("lost", "at task decision"),
    "paused": _feed("run_paused run_resumed", "kind"),
    "ends": _feed("finished extended", "sequence kind detail"),
}
"""By name, in the order in which they are folded: a task's lease comes before its end."""
_FEED_OF = {kind: name for name, feed in FEEDS.items() for kind in feed.kinds}
_COUNTS = (
    f"SELECT kind, count(*) FROM events WHERE kind IN ({', '.join(map(repr, COUNTED))}) "  # noqa: S608 (our names)
    "AND sequence > ? AND sequence <= ? GROUP BY kind"
)
ENDS = ("epochs", "gradients", "until_s", "target")
"""Settings that say when a run ends; an extension replaces all of them."""
KEEP = FEEDS["decided"].columns.index("keep")
"""Where a decision's coefficient is: None where the update was refused."""

folded_rows = row_maker(
    {event: EVENTS[event] for event in (VersionPublished, Evaluated)},
    {command: COMMANDS[command] for command in (AnswerPush, Finish)},
)
"""Makes only the rows that `RunFold` and `VersionFold` read columns of: a run that keeps no ledger needs no others."""

Taker = Callable[[Rows], None]


class FoldPart(Protocol):
    """Counts more than `RunFold` does, from the same rows.

    It may have a method `settle`, which hears after every piece how many versions are published.
    """

    def takers(self) -> Mapping[str, Taker]:
        """Who takes the rows of which feed."""


class RunFold:
    def __init__(self, *parts: FoldPart) -> None:
        self.kinds: Counter[str] = Counter()
        """Rows by kind."""
        self.applied = 0
        self.staleness: Counter[int] = Counter()
        """Applied updates by their staleness, as `counted_staleness` has it."""
        self.refused: Counter[tuple[str, int]] = Counter()
        """Updates decided on and not applied, by outcome and staleness."""
        self.staleness_sum = self.staleness_largest = 0
        """Of applied updates, exactly."""
        self.t = 0
        """Versions published."""
        self.gradients = 0
        """In the versions decided on."""
        self.ended: str | None = None
        """Why the run ended; None while it goes on, also after it was extended."""
        self.ends: dict[str, Any] | None = None
        """The ends that the run was given after it had begun, by the names of the settings."""
        self._t_decided = self._gradients = 0
        """The newest version decided on, and the gradients of all applied updates, those after it included."""
        self._settle = [part.settle for part in parts if hasattr(part, "settle")]
        self._takers = _takers(self._own_takers(), *(part.takers() for part in parts))

    @classmethod
    def of(cls, ledger: Ledger, *parts: FoldPart) -> Self:
        fold = cls(*parts)
        fold.read(ledger.select, 0, ledger.newest())
        return fold

    # --- totals ------------------------------------------------------------------------------------------------------

    @property
    def duplicates(self) -> int:
        """Updates that were pushed again after they had been answered."""
        return self.kinds["repeated"]

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.applied if self.applied else 0.0

    def rejected(self) -> Counter[str]:
        """Updates decided on and not applied, by outcome."""
        found: Counter[str] = Counter()
        for (outcome, _), count in self.refused.items():
            found[outcome] += count
        return found

    # --- rows --------------------------------------------------------------------------------------------------------

    def read(self, select: Select, after: int, until: int) -> None:
        """Fold the rows of a ledger after one and up to another."""
        for begin in range(after, until, SPAN_ROWS):
            span = (begin, min(begin + SPAN_ROWS, until))
            self.kinds.update(dict(select(_COUNTS, span)))
            self._take({name: select(FEEDS[name].query, span) for name in self._takers})

    def take(self, rows: Sequence[NewRow], last: int = 0) -> None:
        """Fold rows as they were made; `last` is the sequence number of the last one, where a ledger gave it."""
        for shape, count in Counter([row[0] for row in rows]).items():
            if shape.kind not in CHATTER:
                self.kinds[shape.kind] += count
        piece: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self._takers}
        for sequence, (shape, values) in enumerate(rows, last - len(rows) + 1):
            feed, picked = _picked(shape)
            if feed in piece:
                piece[feed].append(picked((*values, None, sequence, shape.kind)))
        self._take(piece)

    def _take(self, piece: Mapping[str, Rows]) -> None:
        for name, takers in self._takers.items():
            if piece[name]:
                for take in takers:
                    take(piece[name])
        if self.t > self._t_decided:  # a group whose deadline passed had no last update
            self._t_decided, self.gradients = self.t, self._gradients
        for settle in self._settle:
            settle(self.t)

    def _own_takers(self) -> Mapping[str, Taker]:
        return {"published": self._published, "decided": self._decided, "ends": self._ended}

    def _published(self, rows: Rows) -> None:
        self.t = max(self.t, *(t for _, t in rows))

    def _decided(self, rows: Rows) -> None:
        applied = [row for row in rows if row[KEEP] is not None]
        if len(applied) < len(rows):
            self.refused.update([(row[2], counted_staleness(row[1])) for row in rows if row[KEEP] is None])
        if not applied:
            return
        staleness = [row[1] for row in applied]
        largest = max(staleness)
        self.applied += len(applied)
        self.staleness_sum += sum(staleness)
        self.staleness_largest = max(self.staleness_largest, largest)
        self.staleness.update(staleness if largest < _EXACT_BELOW else map(counted_staleness, staleness))
        t_decided, total, gradients_of_t = self._t_decided, self._gradients, self.gradients
        for t, publish, gradients in map(itemgetter(0, 5, 6), applied):
            if t_decided < t - 1:  # a group whose deadline passed had no last update
                t_decided, gradients_of_t = t - 1, total
            total = min(total + gradients, TOTAL_MAX)
            if publish:
                t_decided, gradients_of_t = t_decided + 1, total
        self._t_decided, self._gradients, self.gradients = t_decided, total, gradients_of_t

    def _ended(self, rows: Rows) -> None:
        for _, kind, detail in rows:
            facts = json.loads(detail)
            if kind == "finished":
                self.ended = str(facts.get("reason", ""))
            else:
                self.ended, self.ends = None, {name: facts[name] for name in ENDS}

    # --- for a checkpoint --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The totals as plain JSON, without those of the parts; the same size for a run of any length."""
        return {
            **{name: getattr(self, name) for name in _PLAIN_TOTALS},
            "kinds": dict(self.kinds),
            "staleness": list(self.staleness.items()),
            "refused": [[*which, count] for which, count in self.refused.items()],
            "t_decided": self._t_decided,
            "gradients_applied": self._gradients,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from totals that `state` gave."""
        for name in _PLAIN_TOTALS:
            setattr(self, name, state[name])
        self.kinds = Counter(state["kinds"])
        self.staleness = Counter(dict(state["staleness"]))
        self.refused = Counter({(outcome, staleness): count for outcome, staleness, count in state["refused"]})
        self._t_decided, self._gradients = state["t_decided"], state["gradients_applied"]


_PLAIN_TOTALS = ("applied", "staleness_sum", "staleness_largest", "t", "gradients", "ended", "ends")
_EXACT_BELOW = 10**STALENESS_DIGITS


def counted_staleness(staleness: int) -> int:
    """The staleness under which an update is counted.

    >>> counted_staleness(9_999), counted_staleness(10_001), counted_staleness(123_456)
    (9999, 10000, 123400)
    """
    if staleness < _EXACT_BELOW:
        return staleness
    unit = int(10 ** (len(str(staleness)) - STALENESS_DIGITS))
    return staleness // unit * unit


class VersionUpdates:
    """Gathers the applied updates of a version until it is complete: under FedAvg a version has several."""

    def __init__(self, complete: Callable[[Sequence[tuple[Any, float, float]]], None]) -> None:
        """`complete` is given the updates of a version in the order of mixing, each as (update, keep, new)."""
        self._complete = complete
        self._t = 0
        self._gathered: list[tuple[Any, float, float]] = []

    def add(self, update: Any, t: int, keep: float, new: float, *, publish: bool) -> None:
        """The next applied update; None is one that was lost and is in no version."""
        if t != self._t:
            self.settle(self._t)  # a group that went on with what had arrived
        self._t = t
        if update is not None:
            self._gathered.append((update, keep, new))
        if publish:
            self.settle(t)

    def settle(self, t: int) -> None:
        """Version t is there, whether or not an update said that it was the last one."""
        if self._gathered and self._t <= t:
            self._complete(self._gathered)
            self._gathered.clear()


def _takers(*some: Mapping[str, Taker]) -> dict[str, list[Taker]]:
    return {name: takers for name in FEEDS if (takers := [one[name] for one in some if name in one])}


@cache
def _picked(shape: RowShape) -> tuple[str | None, Callable[[tuple[Any, ...]], tuple[Any, ...]]]:
    """The feed of rows of this shape, and what takes its columns from (*values, None, sequence, kind)."""
    name = _FEED_OF.get(shape.kind)
    given = {column: index for index, column in enumerate(shape.columns)}
    missing = len(given)
    given |= {"sequence": missing + 1, "kind": missing + 2}
    places = [given.get(column, missing) for column in FEEDS[name].columns] if name else []
    if len(places) == 1:
        return name, lambda values: (values[places[0]],)
    return name, itemgetter(*places) if places else tuple
