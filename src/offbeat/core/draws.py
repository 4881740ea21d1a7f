"""Owns cheap keyed randomness: a number that depends on its key and on nothing else.

A stream would have to be consumed in one order; a keyed number can be asked for at any time, by any process, after any
crash. numpy's generators are keyed the same way where many numbers are needed at once (`Work.rng`); this is for one.
"""

from hashlib import blake2b
from struct import Struct

_KEY = Struct("<4Q")
_WORD = 2**64 - 1


def word(seed: int, stream: int, number: int, attempt: int = 0) -> int:
    """64 random bits for this key.

    >>> word(1, 2, 3) == word(1, 2, 3), word(1, 2, 3) == word(1, 2, 4)
    (True, False)
    """
    key = _KEY.pack(seed & _WORD, stream & _WORD, number & _WORD, attempt & _WORD)
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def uniform(seed: int, stream: int, number: int, attempt: int = 0) -> float:
    """A number in (0, 1) for this key: neither end is ever hit, so that it can go through any inverse distribution.

    >>> 0 < uniform(1, 2, 3) < 1
    True
    """
    return ((word(seed, stream, number, attempt) >> 12) + 0.5) * 2.0**-52


def below(bound: int, seed: int, stream: int, number: int, attempt: int = 0) -> int:
    """A whole number in 0..bound-1 for this key.

    >>> {below(3, 0, 0, n) for n in range(50)}
    {0, 1, 2}
    """
    return word(seed, stream, number, attempt) * bound >> 64
