"""The lines of a comparison in progress: what is left to do, and about how long it takes."""

from collections.abc import Callable, Mapping
from time import monotonic


class Progress:
    """Counts the parts and roads of a comparison, and estimates how long the rest takes.

    Args:
        totals: kind, such as "road" -> number over all seeds.
        now: clock, in seconds.
    """

    def __init__(self, totals: Mapping[str, int], now: Callable[[], float] = monotonic) -> None:
        self._left, self._now = dict(totals), now
        self._seconds: dict[str, list[float]] = {kind: [] for kind in totals}
        self._start = now()

    def done(self, kind: str, line: str, reused: bool) -> None:
        """Print a line about what was done since the last call, with what is left."""
        end = self._now()
        if not reused:
            self._seconds[kind].append(end - self._start)
        self._start = end
        self._left[kind] -= 1
        print(f"{line}; {self._what_is_left()}", flush=True)

    def _what_is_left(self) -> str:
        """What is left; minutes as if everything to come took the mean time of its kind so far."""
        left = {kind: count for kind, count in self._left.items() if count}
        if not left:
            return "nothing left"
        counts = " and ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in left.items())
        if not all(self._seconds[kind] for kind in left):
            return f"{counts} left"
        seconds = sum(count * sum(self._seconds[kind]) / len(self._seconds[kind]) for kind, count in left.items())
        return f"{counts} left, about {max(1, round(seconds / 60))} min"
