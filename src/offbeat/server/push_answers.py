"""Owns the latest answers to pushes: that one is refused is normal; when most are, somebody should look.

Rules kept here:
- What counts is a refusal for what the update is: not when it comes (`too_stale`, `busy`), nor who sends it.
- It is said from a half of the latest on, and over below a third: else it would come and go.
"""

from collections import Counter, deque

from offbeat.server.open_troubles import REFUSED, OpenTroubles
from offbeat.server.refusals import KINDS, Refusal

LATEST, ENOUGH = 40, 20
"""Answers that are looked at, and how many there must be before anything is said."""
BAD = (400, 411, 413, 415, 422, 426)


class PushAnswers:
    def __init__(self, troubles: OpenTroubles) -> None:
        self._troubles = troubles
        self._latest: deque[str | None] = deque(maxlen=LATEST)

    def add(self, refusal: Refusal | None) -> None:
        """One more push was refused, or applied."""
        if refusal is not None and refusal.status not in BAD:
            return
        self._latest.append(None if refusal is None else refusal.error)
        many = len(self._latest)
        bad = many - self._latest.count(None)
        if many >= ENOUGH and 2 * bad >= many:
            words = Counter(word for word in self._latest if word is not None)
            self._troubles.note(REFUSED, _most_refused(words, many))
        elif 3 * bad < many:
            self._troubles.over(REFUSED)


def _most_refused(words: Counter[str], many: int) -> str:
    word, count = words.most_common(1)[0]
    return (
        f"{words.total()} of the latest {many} updates were refused, {count} of them as {word}; the page and "
        f"GET /v1/workers show whose they are. What such a worker is told: {KINDS[word].do}"
    )
