"""Pages between the host pool and L3: find, prefetch, archive."""

import logging
import mmap
import time
from collections.abc import Callable, Sequence

import numpy as np

from services.storage.backend import MAX_BATCH, ModelPages
from services.storage.operations import Operation, RefusedError
from shared.errors import SegmentError
from shared.host_layout import HostPages
from shared.messages.common import Message
from shared.messages.storage import (
    ArchiveDone,
    ArchivePages,
    FindPages,
    Found,
    PrefetchDone,
    PrefetchPages,
    PrefetchProgress,
)
from shared.packed import pack, unpack
from shared.page_hash import DIGEST_BYTES
from shared.segments import OwnedSegment, PageIds
from shared.tracing import record

log = logging.getLogger("kvtide.storage")

BATCH = 8  # pages between two reports: a waiting request sees its prefix grow in steps of 8 x 64 tokens


async def find(store: ModelPages, message: FindPages) -> Message:
    """Found: how many leading pages L3 has."""
    start_s = time.monotonic()
    wanted, hits = split_digests(message.digests), 0
    for start in range(0, len(wanted), MAX_BATCH):
        batch = wanted[start : start + MAX_BATCH]
        found = await store.batch_exists(batch)
        hits += found
        if found < len(batch):
            break
    seconds = time.monotonic() - start_s
    log.info("lookup request=%s pages=%d found=%d seconds=%.6f", message.request_id, len(wanted), hits, seconds)
    record("lookup", message.request_id, seconds, **{"kvtide.pages": len(wanted), "kvtide.found_pages": hits})
    return Found(message.op_id, hits)


async def prefetch(
    store: ModelPages,
    segment: OwnedSegment,
    operation: Operation,
    message: PrefetchPages,
    progress: Callable[[Message], None],
) -> Message:
    """Read pages into the pool and name those whose content was right; PrefetchDone lists them.

    A name that was reported stays, whatever happens to the pages after it: the scheduler may use it already.
    """
    start_s = time.monotonic()
    pages, digests = page_list(segment, message.pages, message.digests)
    named = [position for position, page in enumerate(pages) if segment.name_of(int(page))]
    if named:
        raise RefusedError("name", f"a prefetch into pages {pages[named][:4].tolist()}, which have names", named)
    corrupt = 0
    try:
        for positions in _batches(len(pages)):
            if operation.stop.is_set():
                break
            buffers = [_room(segment.host_pages, int(page)) for page in pages[positions]]
            read = await store.batch_get([digests[each] for each in positions], buffers, operation.stop)
            corrupt += read.corrupt
            for position, buffer, checksums in zip(positions, buffers, read.checksums, strict=True):
                if checksums is not None:
                    if segment.host_pages.spread:
                        segment.host_pages.put(int(pages[position]), np.frombuffer(buffer, np.uint8))
                    segment.set_names(pages[[position]], digests[position], checksums)
                    operation.named.append(position)
            if not operation.stop.is_set():
                progress(PrefetchProgress(message.op_id, pack(operation.named)))
    except Exception:  # what the backend raises is its own; the pages that are left are misses
        log.exception("prefetch_cut_short op_id=%d named=%d", message.op_id, len(operation.named))
    seconds, got = time.monotonic() - start_s, len(operation.named)
    log.info("prefetch request=%s pages=%d named=%d seconds=%.6f", message.request_id, len(pages), got, seconds)
    record("prefetch", message.request_id, seconds, **{"kvtide.pages": len(pages), "kvtide.named_pages": got})
    return PrefetchDone(message.op_id, pack(operation.named), corrupt, seconds)


async def archive(store: ModelPages, segment: OwnedSegment, operation: Operation, message: ArchivePages) -> Message:
    """Write pages to L3 that have the names given; ArchiveDone lists those that it has then."""
    start_s = time.monotonic()
    pages, digests = page_list(segment, message.pages, message.digests)
    stored: list[int] = []
    for batch in _batches(len(pages)):
        if operation.stop.is_set():
            break
        names = {each: segment.name_of(int(pages[each])) for each in batch}
        right = {each: name for each, name in names.items() if name is not None and name.digest == digests[each]}
        results = await store.batch_set(
            [name.digest for name in right.values()],
            [segment.host_pages.get(int(pages[each])).data for each in right],
            [name.checksums for name in right.values()],
            operation.stop,
        )
        stored += [each for each, done in zip(right, results, strict=True) if done]
    stored = [each for each in stored if store.holds(digests[each])]  # the quota may have taken the first ones again
    return ArchiveDone(message.op_id, pack(stored), time.monotonic() - start_s)


def page_list(segment: OwnedSegment, pages: bytes, digests: bytes) -> tuple[PageIds, list[bytes]]:
    """int32 [n] pages and their digests. Raises SegmentError for lists that don't fit each other or the segment."""
    ids, names = unpack(pages), split_digests(digests)
    if len(names) != len(ids) or len(np.unique(ids)) != len(ids):
        raise SegmentError(f"{len(ids)} pages, {len(np.unique(ids))} of them different, came with {len(names)} digests")
    return ids, names


def split_digests(digests: bytes) -> list[bytes]:
    """The digests of a message. Raises SegmentError when there is a piece left over."""
    if len(digests) % DIGEST_BYTES:
        raise SegmentError(f"{len(digests)} bytes are not whole digests of {DIGEST_BYTES}")
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def _room(host: HostPages, page: int) -> memoryview:
    """Where a page's bytes arrive: its own memory, or a buffer on a block's border when it lies in many places."""
    return memoryview(mmap.mmap(-1, host.geometry.page_bytes)) if host.spread else host.get(page).data


def _batches(count: int) -> Sequence[range]:
    return [range(start, min(start + BATCH, count)) for start in range(0, count, BATCH)]
