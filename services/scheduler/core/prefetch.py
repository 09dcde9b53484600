"""L3 -> host pages while a request waits (STORE-06)."""

from itertools import takewhile

import numpy as np

from services.scheduler.core.events import PeerKey
from services.scheduler.core.ghosts import Fate, Reason
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.operations import Adopt, Find, Operation, Prefetch
from services.scheduler.core.pages import HostPool, Pages
from services.scheduler.core.request import Request, RequestState, Reservation
from services.scheduler.core.settings import (
    LOOKUP_TIMEOUT_S,
    MAX_LOOKUPS,
    PREFETCH_BASE_S,
    PREFETCH_MAX_S,
    PREFETCH_PER_1024_TOKENS_S,
    PREFETCH_SHARE,
)
from services.scheduler.core.state import State
from services.scheduler.core.worth import SLOW_FETCH, fetch_refusal, is_long_enough
from shared.messages.storage import AdoptPages, FindPages, PrefetchPages
from shared.packed import pack, unpack_list
from shared.page_hash import chain


class Prefetcher:
    """Asks L3 for what a new request lacks; requests with the same next page share one answer."""

    def __init__(self, state: State, host: HostMemory) -> None:
        self._state = state
        self._host = host
        self._by_digest: dict[bytes, Find | Prefetch] = {}  # what is being looked up or fetched
        self._hungry: list[tuple[Find, int]] = []  # found, waiting for host pages: (lookup, pages found)

    def consider(self, request: Request) -> None:
        """Send a request to an adoption, to LOOKUP, to one of either that runs already, or to READY."""
        request.state, request.state_deadline = RequestState.READY, float("inf")
        limit = (request.length - 1) // self._state.settings.page_size
        asked = self._host.lookups() if self._state.settings.prefetch and request.lookups < MAX_LOOKUPS else {}
        if not limit or not (asked or any(pool.orphans for pool in self._host.pools.values())):
            request.note(0, limit, *self._unasked(request))
            return
        match = self._state.tree.match_prefix(request.seed, bytes(request.tokens), limit)
        first = match.device_pages + match.host_pages
        if first == limit:
            return
        parent = self._state.tree.digests(match.end)[-1] if not match.end.is_root else request.seed
        start = first * self._state.tree.page_bytes
        digests = list(chain(parent, bytes(request.tokens[start:]), self._state.settings.page_size))[: limit - first]
        running = self._by_digest.get(digests[0])
        if running is not None:
            self._join(request, running)
        elif self._adopt(request, match.end, first, digests):
            return
        elif not asked:
            request.note(first, limit, *self._unasked(request))
        elif not is_long_enough(self._state, limit - first):
            request.note(first, limit, "below_threshold", "prefetch_threshold")
        else:
            self._look_up(request, match.end, first, digests, list(asked.values()))

    def _unasked(self, request: Request) -> tuple[Reason, str]:
        settings, pools = self._state.settings, self._host.pools.values()
        if not settings.prefetch or not settings.host_tier:
            return "off", "prefetch" if settings.host_tier else "host_bytes"
        if request.lookups >= MAX_LOOKUPS:
            return "not_asked", "lookups"
        return ("off", "backend") if any(pool.usable for pool in pools) else ("storage_down", "")

    def _join(self, request: Request, running: Find | Prefetch) -> None:
        request.state = RequestState.LOOKUP
        running.requests.append(request)
        request.fetch = running
        request.state_deadline = running.requests[0].state_deadline

    def _look_up(self, request: Request, end: Node, first: int, digests: list[bytes], storages: list[PeerKey]) -> None:
        request.lookups += 1
        request.state, request.state_deadline = RequestState.LOOKUP, self._state.now + LOOKUP_TIMEOUT_S
        find = Find(
            seed=request.seed,
            tokens=bytes(request.tokens[: (first + len(digests)) * self._state.tree.page_bytes]),
            first=first,
            digests=digests,
            requests=[request],
            lock=self._state.tree.lock(end),
        )
        request.fetch = find
        self._by_digest[digests[0]] = find
        message = FindPages(self._state.operations.new_id(), b"".join(digests), request.key.request_id)
        self._state.counters["lookups"] += 1
        self._state.operations.start(find, message, storages)

    def _adopt(self, request: Request, end: Node, first: int, digests: list[bytes]) -> bool:
        """Start to adopt the leading pages that are orphaned in one pool. False when there are none."""
        pool = next((pool for pool in self._host.pools.values() if pool.usable and digests[0] in pool.orphans), None)
        storage = self._host.storage_of(pool) if pool is not None else None
        if pool is None or storage is None:
            return False
        run = list(takewhile(pool.orphans.__contains__, digests))[: self._share(pool) - pool.prefetching]
        if not run:
            return False
        operation = Adopt(
            pool=pool,
            host_pages=np.array([pool.orphans.pop(digest) for digest in run], np.int32),
            lock=self._state.tree.lock(end),
            seed=request.seed,
            tokens=bytes(request.tokens[: (first + len(run)) * self._state.tree.page_bytes]),
            first=first,
            digests=run,
            requests=[request],
        )
        request.fetch = operation
        request.state, request.state_deadline = RequestState.PREFETCHING, self._state.now + LOOKUP_TIMEOUT_S
        for digest in run:
            self._by_digest[digest] = operation
        pool.prefetching += len(run)
        pages = pack(operation.host_pages)
        message = AdoptPages(self._state.operations.new_id(), pool.segment_epoch, pages, b"".join(run))
        self._state.operations.start(operation, message, [storage])
        return True

    def _share(self, pool: HostPool) -> int:
        return max(1, int(pool.total * PREFETCH_SHARE))

    def found(self, find: Find) -> None:
        """Fetch what the L3 with most of it has, if it is long enough and its first request still waits."""
        hits = max(find.hits.values(), default=0)
        self._state.ghosts.note("storage", find.digests[:hits], "stored")
        self._note(find, hits, len(find.digests), "never_seen")
        tokens = max((request.length for request in find.requests), default=0)
        refusal = fetch_refusal(self._state, hits, tokens - find.first * self._state.settings.page_size)
        if refusal is not None:
            self._note(find, 0, hits, refusal.reason, refusal.cause)
            if refusal is SLOW_FETCH:
                self._state.speeds.fetch.refused()
                self._state.counters["prefetch_dropped_slower"] += hits
        if refusal is not None or find.failed or not find.requests or find.lock is None or find.lock.node is None:
            self.end(find)
            return
        for request in find.requests:
            request.state_deadline = self._deadline(request, hits)
        self._hungry.append((find, hits))
        self._state.space_freed = True

    def retry(self) -> None:
        """Start the fetches that wait for host pages, as far as there are any."""
        hungry, self._hungry = self._hungry, []
        for find, hits in hungry:
            dropped = "" if not find.requests or find.failed else self._fetch(find, hits)
            if dropped is not None:
                self._note(find, 0, hits, "dropped" if dropped else "storage_down", dropped)
                self.end(find)

    def _fetch(self, find: Find, hits: int) -> str | None:
        """Start a fetch, or keep it waiting for released pages; else the bound that it has met, "" = no storage."""
        best = max(find.hits, key=lambda key: find.hits[key])
        asked = self._host.pools.get(best)
        above = find.lock.node.host if find.lock is not None and find.lock.node is not None else None
        backend_id = asked.backend.backend_id if asked is not None and asked.backend is not None else None
        wanted = min(hits, len(find.digests))
        pool = self._host.pool_for(wanted, above.pool if above is not None else None, backend_id)
        storage = self._host.storage_of(pool) if pool is not None else None
        if pool is None or storage is None or backend_id is None:
            return ""
        share = int(pool.total * PREFETCH_SHARE)
        count = min(wanted, share)
        full = pool.prefetching + count > share
        if not is_long_enough(self._state, count) or (full and self._kept(pool) + count > share):
            self._state.counters["prefetch_dropped_no_room"] += hits
            return "no_room"
        if full:
            self._hungry.append((find, hits))  # until another fetch makes room or the request's time is over
            return None
        pages = pool.alloc(count)
        if pages is None:
            request = find.requests[0]
            if not self._host.evict_host(
                pool, count, Fate("evicted", "prefetch", request.key.request_id, request.seed)
            ):
                self._state.counters["prefetch_dropped_no_host_page"] += hits
                return "no_host_page"
            self._hungry.append((find, hits))
            return None
        self._note(find, count, wanted, "dropped", "no_room")
        self._start(find, pool, storage, pages)
        return None

    def _kept(self, pool: HostPool) -> int:
        """Pages reserved for requests that wait for host pages themselves: waiting for those would never end."""
        hungry = {each for each in self._by_digest.values() if each.op_id not in self._state.operations.table}
        kept = [request.reserved for each in hungry for request in each.requests]
        return sum(each.pages for each in kept if each is not None and each.pool is pool)

    def _start(self, find: Find, pool: HostPool, storage: PeerKey, pages: Pages) -> None:
        digests = find.digests[: len(pages)]
        request = find.requests[0]
        end = (find.first + len(pages)) * self._state.tree.page_bytes
        operation = Prefetch(
            pool=pool,
            host_pages=pages,
            lock=find.lock,
            seed=find.seed,
            tokens=find.tokens[:end],
            first=find.first,
            digests=digests,
            requests=find.requests,
        )
        find.lock, find.requests = None, []
        self._forget(find)
        for digest in digests:
            self._by_digest[digest] = operation
        pool.prefetching += len(pages)
        deadline = self._deadline(request, len(pages))
        for waiting in operation.requests:
            waiting.fetch = operation
            waiting.state, waiting.state_deadline = RequestState.PREFETCHING, deadline
        op_id, name = self._state.operations.new_id(), request.key.request_id
        message = PrefetchPages(op_id, pool.segment_epoch, pack(pages), b"".join(digests), name)
        self._state.counters["prefetch_pages"] += len(pages)
        operation.timeout_s = max(operation.timeout_s, PREFETCH_MAX_S)
        self._state.operations.start(operation, message, [storage])

    def _deadline(self, request: Request, pages: int) -> float:
        policy = self._state.settings.prefetch_policy
        if policy != "timeout":  # best_effort ends with the request's admission
            return request.deadline
        tokens = pages * self._state.settings.page_size
        wait_s = PREFETCH_BASE_S + PREFETCH_PER_1024_TOKENS_S * tokens / 1024
        return min(self._state.now + min(wait_s, PREFETCH_MAX_S), request.deadline)

    def progressed(self, operation: Prefetch, named: bytes) -> None:
        """Note what is named so far."""
        if not operation.failed:
            operation.named = max(operation.named, _leading(named, len(operation.host_pages)))

    def fetched(self, operation: Prefetch, named: bytes, corrupt: int = 0) -> None:
        """PrefetchDone or Cancelled: the leading named pages join the tree, the others go back."""
        self._state.counters["prefetch_corrupt_pages"] += corrupt
        self.progressed(operation, named)
        self._note_missing(operation, corrupt)
        self._take(operation)
        all_named = set(unpack_list(named))
        self._give_back(operation, all_named)
        self.end(operation)

    def _note_missing(self, operation: Prefetch, corrupt: int) -> None:
        """The leading pages are used up to the first that isn't named: it was bad, or it wasn't read."""
        bad, end = operation.named, len(operation.digests)
        if bad == end or isinstance(operation, Adopt):
            return
        reason: Reason = "corrupted" if corrupt else "failed"
        self._state.ghosts.note("storage", operation.digests[bad : bad + 1], reason, "prefetch")
        self._note(operation, bad, bad + 1, reason, "prefetch")
        self._note(operation, bad + 1, end, "behind_gap")

    def _note(self, operation: Find | Prefetch, first: int, last: int, reason: Reason, cause: str = "") -> None:
        for request in operation.requests:
            request.note(operation.first + first, operation.first + last, reason, cause)

    def _take(self, operation: Prefetch) -> None:
        """Put the leading named pages into the tree, once."""
        lock, pool = operation.lock, operation.pool
        if lock is None or lock.node is None or pool is None or pool.dead or operation.failed or operation.taken:
            return
        count = operation.named
        if count and not lock.node.detached:
            tree = self._state.tree
            tokens = operation.tokens[: (operation.first + count) * tree.page_bytes]
            span = HostSpan(pool, operation.host_pages[:count])
            self._host.release(tree.insert_host(operation.seed, tokens, operation.first, span))
            operation.taken = count
            adopted = isinstance(operation, Adopt)
            pool.archived[operation.host_pages[:count]] = not adopted
            pool.prefetching -= count
            self._state.counters["adopted_pages" if adopted else "prefetch_taken_pages"] += count
            for position, request in enumerate(operation.requests):
                if not adopted:
                    request.prefetched = (operation.first, operation.first + count)
                self._reserve(request, pool, 0 if position else count, operation.first + count)
        operation.lock = None
        self._state.unlock(lock)

    def _reserve(self, request: Request, pool: HostPool, count: int, pages: int) -> None:
        """Keep what was fetched for a request until its admission; it stays within the share of prefetches."""
        self.unreserve(request)
        end = self._state.tree.match_prefix(request.seed, bytes(request.tokens), pages).end
        request.reserved = Reservation(self._state.tree.lock(end), pool, count)
        pool.prefetching += count

    def unreserve(self, request: Request) -> None:
        """The request is admitted or ends, or an older one needs the memory."""
        if request.reserved is not None:
            lock, pool, count = request.reserved
            request.reserved = None
            pool.prefetching -= count
            self._state.unlock(lock)
            self._state.space_freed = True

    def _give_back(self, operation: Prefetch, named: set[int]) -> None:
        pool = operation.pool
        if pool is None or pool.dead:
            return
        rest = range(operation.taken, len(operation.host_pages))
        pool.prefetching -= len(rest)
        by_name: dict[bool, list[int]] = {True: [], False: []}
        for position in rest:
            by_name[position in named or isinstance(operation, Adopt)].append(position)
        self._host.release([HostSpan(pool, operation.host_pages[by_name[True]])])
        self._host.give_back(pool, operation.host_pages[by_name[False]])

    def give_up(self, operation: Operation) -> None:
        """A lookup or fetch has failed or its time is over: its requests go on with what is there."""
        if isinstance(operation, Prefetch):
            self._take(operation)
        if isinstance(operation, (Find, Prefetch)):
            if not isinstance(operation, Adopt):
                done = operation.taken if isinstance(operation, Prefetch) else 0
                self._note(operation, done, len(operation.digests), "storage_down")
            self.end(operation)

    def settle(self, operation: Prefetch) -> None:
        """A fetch in doubt has ended: any of its pages may have been named."""
        pool = operation.pool
        if pool is not None and not pool.dead:
            rest = operation.held_host_pages
            pool.prefetching -= len(rest)
            self._host.release([HostSpan(pool, rest)])

    def expire(self, request: Request) -> None:
        """A request has waited long enough for its lookup or fetch."""
        operation = request.fetch
        if operation is not None:
            self._state.counters["prefetch_timed_out"] += 1
            if isinstance(operation, Prefetch):
                self._take(operation)
                self._note(operation, operation.taken, len(operation.digests), "timed_out", "prefetch")
                self._state.operations.cancel(operation)
                self.end(operation, request)
            else:
                self._note(operation, 0, len(operation.digests), "timed_out", "lookup")
                self._stop_waiting(request, operation)
        request.state, request.state_deadline = RequestState.READY, float("inf")

    def leave(self, request: Request) -> None:
        """A request ends: what only it waited for is dropped."""
        operation = request.fetch
        if operation is None:
            return
        self._stop_waiting(request, operation)
        if not operation.requests:
            if operation.op_id in self._state.operations.table:
                self._state.operations.cancel(operation)
            if isinstance(operation, Prefetch):
                self.end(operation)

    def end(self, operation: Find | Prefetch, goes_on: Request | None = None) -> None:
        """No request waits for it any more: one, the first if not said otherwise, goes on; the others look again."""
        self._forget(operation)
        if operation.lock is not None:
            lock, operation.lock = operation.lock, None
            self._state.unlock(lock)
        requests, operation.requests = operation.requests, []
        for request in requests:
            request.fetch = None
            request.state, request.state_deadline = RequestState.READY, float("inf")
            if request is not (goes_on or requests[0]) or (isinstance(operation, Adopt) and goes_on is None):
                self.consider(request)

    def _stop_waiting(self, request: Request, operation: Find | Prefetch) -> None:
        operation.requests.remove(request)
        request.fetch = None

    def dismiss_hungry(self) -> bool:
        """Lookups that wait for host pages end without: their locks protect device memory that a request needs."""
        hungry, self._hungry = self._hungry, []
        for find, _ in hungry:
            self._state.counters["prefetch_dismissed"] += 1
            self._note(find, 0, len(find.digests), "dropped", "dismissed")
            self.end(find)
        return bool(hungry)

    def hungry(self) -> list[Find]:
        """Lookups that have ended and wait for host pages."""
        return [find for find, _ in self._hungry]

    def _forget(self, operation: Find | Prefetch) -> None:
        for digest in operation.digests:
            if self._by_digest.get(digest) is operation:
                del self._by_digest[digest]


def _leading(named: bytes, pages: int) -> int:
    """How many leading positions are named: the usable prefix ends at the first gap."""
    have = set(unpack_list(named))
    return next((position for position in range(pages) if position not in have), pages)
