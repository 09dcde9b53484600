"""Commands about the names of host pages: commit and release them, list and adopt those of an earlier scheduler."""

import numpy as np

from services.storage.operations import RefusedError
from services.storage.transfers import page_list
from shared.errors import SegmentError
from shared.messages.common import Message
from shared.messages.storage import (
    Adopted,
    AdoptPages,
    CommitPages,
    Committed,
    Inventory,
    ListPages,
    Released,
    ReleasePages,
)
from shared.packed import pack, unpack
from shared.segments import OwnedSegment


def commit(segment: OwnedSegment, message: CommitPages) -> Message:
    """Name all pages or none. A page that has another name was written before its release: refused."""
    pages, digests = page_list(segment, message.pages, message.digests)
    units = segment.geometry.units
    if len(message.checksums) != 4 * units * len(pages):
        raise SegmentError(f"{len(message.checksums)} bytes of checksums for {len(pages)} pages of {units} units")
    checksums = np.frombuffer(message.checksums, "<u4").reshape(len(pages), units)
    wrong = []
    for position, page in enumerate(pages):
        name = segment.name_of(int(page))
        if name and (name.digest != digests[position] or (name.checksums != checksums[position]).any()):
            wrong.append(position)
    if wrong:
        raise RefusedError("name", f"a commit of pages {pages[wrong][:4].tolist()}, which have other names", wrong)
    segment.set_names(pages, message.digests, checksums)
    return Committed(message.op_id)


def release(segment: OwnedSegment, message: ReleasePages) -> Message:
    """Take names back."""
    segment.clear_names(unpack(message.pages))
    return Released(message.op_id)


def inventory(segment: OwnedSegment, message: ListPages) -> Message:
    """The named pages of a part of the segment."""
    pages = segment.named_in(message.first_page, message.count)
    names = [segment.name_of(int(page)) for page in pages]
    return Inventory(message.op_id, pack(pages), b"".join(name.digest for name in names if name is not None))


def adopt(segment: OwnedSegment, message: AdoptPages) -> Message:
    """Which of the pages have the names that the scheduler expects?"""
    pages, digests = page_list(segment, message.pages, message.digests)
    names = [segment.name_of(int(page)) for page in pages]
    named = [each for each, name in enumerate(names) if name is not None and name.digest == digests[each]]
    segment.touch(pages[named])
    return Adopted(message.op_id, pack(named))
