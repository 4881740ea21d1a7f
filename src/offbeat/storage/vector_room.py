"""Owns what a rule's vectors take, in memory and on the disk: it is said before a run begins, and refused if too much.

Rules kept here:
- Counted is what is there beside w and x: the rule's slots, the averaged model, and a vector per device where the rule
  keeps one.
- The vectors of devices are in memory where they take at most half of what is free, else on the disk.
"""

import shutil
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from offbeat.core.rules import Average, Rule
from offbeat.errors import InvalidValue

Where = Literal["memory", "disk"]
BYTES_PER_FLOAT = 4
CACHED_SHARE = 2
"""The part of the free memory that the vectors of devices may take: one in this many."""
ON_DISK = 2
"""How often such a vector may lie on the disk: the two newest checkpoints may have different ones."""
UNKNOWN = 1 << 62


class VectorRoom(NamedTuple):
    vectors: int
    """Slots, and the mean of the versions."""
    caches: int
    """Vectors of devices."""
    where: Where
    """Where those are."""
    vector_bytes: int

    @property
    def memory_bytes(self) -> int:
        return self.vector_bytes * (self.vectors + (self.caches if self.where == "memory" else 0))

    def words(self) -> str:
        """What is kept beside the model, for people; empty where nothing is."""
        some = f"{self.vectors} vector{'s' * (self.vectors > 1)} ({_size(self.vectors * self.vector_bytes)})"
        cached = (
            f"one for each of {self.caches:,} devices ({_size(self.caches * self.vector_bytes)}, {_place(self.where)})"
        )
        kept = [some] * (self.vectors > 0) + [cached] * (self.caches > 0)
        return f"Beside the model there are {' and '.join(kept)}." if kept else ""


def vector_room(
    rule: Rule, average: Average | None, devices: int, size: int, asked: str | None, folder: Path | None
) -> VectorRoom:
    """What this rule needs for a model of `size` elements and so many devices; refused where it does not fit.

    `asked` is the setting device_cache; the disk that counts is that of `folder`.
    """
    if asked not in (None, *get_args(Where)):
        raise InvalidValue(f"device_cache is {asked!r}; use memory, disk, or leave it out")
    vectors, vector_bytes = len(rule.slots) + (average is not None), size * BYTES_PER_FLOAT
    caches = 0 if rule.caches is None else min(devices, rule.caches or devices)
    free, cached = memory_free(), caches * vector_bytes
    fits = vectors * vector_bytes + CACHED_SHARE * cached <= free
    where: Where = "disk" if asked == "disk" or (asked is None and not fits) else "memory"
    room = VectorRoom(vectors, caches, where, vector_bytes)
    if room.memory_bytes > free:
        hint = "; device_cache disk keeps those of devices on the disk" if caches and where == "memory" else ""
        raise InvalidValue(f"{_needs(rule, room)}; {_size(free)} of memory are free{hint}")
    if where == "disk" and ON_DISK * cached > disk_free(folder):
        raise InvalidValue(
            f"{_needs(rule, room)}; {_size(disk_free(folder))} are free there, and it may need twice that"
        )
    return room


def memory_free() -> int:
    """Bytes of memory that are free; a large number where the system does not say it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNKNOWN
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), UNKNOWN)


def disk_free(folder: Path | None) -> int:
    """Bytes that are free where a run's folder is, or will be."""
    place = folder.absolute() if folder is not None else Path.cwd()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _needs(rule: Rule, room: VectorRoom) -> str:
    return f"rule {rule.spec} does not fit: {room.words()[:1].lower()}{room.words()[1:].removesuffix('.')}"


def _place(where: Where) -> str:
    return "in memory" if where == "memory" else "on the disk"


def _size(count: int) -> str:
    """A number of bytes for people.

    >>> _size(1500), _size(3_200_000)
    ('1.5 kB', '3.2 MB')
    """
    size, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
