"""Owns what is known of a data set before it is fetched: its archive, its files, its addresses.

Rules kept here:
- A digest names its kind: "sha256:..." or "sha1:...".
- An environment variable replaces all addresses by a mirror's. The digest stays: a mirror has to serve the same bytes.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import InvalidValue

SCHEMES = ("https://", "http://", "file://")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of an archive."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set in its official archive."""

    title: str
    archive: str
    size: int
    digest: str
    official: tuple[str, ...]
    """Addresses of the archive, tried in this order."""
    variable: str
    """The environment variable that names a mirror."""
    folder: str
    """The one folder in the archive, and its name in the cache."""
    files: tuple[DataFile, ...]
    """The files that are taken out of it; others stay inside."""

    def addresses(self) -> tuple[str, ...]:
        """Where to fetch the archive from: the mirror, if one is named, else the official addresses."""
        mirror = os.environ.get(self.variable, "")
        if not mirror:
            return self.official
        if not mirror.startswith(SCHEMES):
            raise InvalidValue(f"{self.variable} is {mirror!r}; an address starts with {', '.join(SCHEMES)}")
        return (mirror,)

    def by_hand(self, root: Path) -> str:
        """What a user without a network can do, in words."""
        return (
            f"put {self.archive} into {root}, or unpack it there (it makes {root / self.folder}), "
            f"or set {self.variable} to a mirror's address"
        )
