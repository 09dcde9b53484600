"""What a page holds: for each token the hash of the whole sequence up to it.

A slot is the pair (hash before its token, hash after it). Attention walks a request's slots; where one doesn't follow
from the one before, or the first doesn't follow from the namespace, a wrong page was read: every token after that
comes out wrong. Python's hash of a tuple of ints is the same in every process.
"""

import struct
from collections.abc import Iterable, Sequence

VOCABULARY = 48  # small, so that stop tokens do occur
RANK_MARK = 0x5BD1E995
WRONG = 1  # mixed into a hash that a wrong page has spoilt


Slot = tuple[int, int]  # the key and value of one token: hash before it, hash after it
EMPTY: Slot = (-1, -1)
PageContent = tuple[Slot, ...]  # one slot for each token


def root(seed: bytes) -> int:
    """The hash that a namespace's sequences start from."""
    return int.from_bytes(seed[:7], "little")


def follow(before: int, token: int) -> int:
    """The hash of a sequence that is longer by `token`."""
    return hash((before, token))


def next_token(after: int) -> int:
    """The token that the simulated model generates."""
    return (after >> 7) % VOCABULARY + 1


def walk(start: int, tokens: Iterable[int]) -> list[Slot]:
    """The slots of a sequence."""
    slots = []
    for token in tokens:
        after = follow(start, token)
        slots.append((start, after))
        start = after
    return slots


def of_rank(slots: list[Slot], rank: int) -> list[Slot]:
    """What a TP rank keeps of them: its own heads, which are no other rank's."""
    mark = rank * RANK_MARK
    return [(before ^ mark, after ^ mark) for before, after in slots] if rank else slots


def attend(start: int, slots: Iterable[Slot], rank: int = 0) -> int:
    """The hash that reading `slots` gives: the sequence's own when every slot is the right one."""
    mark = rank * RANK_MARK
    start ^= mark
    for before, after in slots:
        start = after if before == start else hash((start ^ mark, after, WRONG)) ^ mark
    return start ^ mark


def spoil(page: PageContent) -> PageContent:
    """The page with one wrong slot."""
    return (EMPTY, *page[1:])


def checksum(pages: Sequence[PageContent]) -> bytes:
    """uint32 for each page (the simulated geometry has one unit)."""
    return b"".join([struct.pack("<I", hash(page) & 0xFFFFFFFF) for page in pages])
