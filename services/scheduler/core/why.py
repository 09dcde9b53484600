"""Why a prompt's tokens were computed: for each part of it the tier that gave it, and the fate of the page elsewhere.

An explanation is made at admission, from the tree, the ghosts and what the request's lookups have told.
"""

from collections import OrderedDict
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from services.scheduler.core.ghosts import TIERS, Fate, Tier
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.node import Node
from services.scheduler.core.request import Request
from services.scheduler.core.state import State
from services.scheduler.core.tree import Match
from shared.page_hash import chain

MAX_EXPLANATIONS = 1024  # the last requests: some 2 KB each, asked for within minutes of the answer
MAX_SEGMENTS = 128  # of one explanation: a conversation has a few; what comes after them is told as one
MAX_TENANTS = 1024  # whose namespaces are known, the longest unused go first
MAX_NAMESPACES = 16  # of a tenant that are looked at: each costs a walk down the tree

NEVER_SEEN, BEHIND_GAP, OFF = Fate("never_seen"), Fate("behind_gap"), Fate("off")
STORAGE_DOWN, NOT_ASKED = Fate("storage_down"), Fate("not_asked")
OTHER_NAMESPACE = Fate("other_namespace")


Known = tuple[Fate | None, Fate | None, Fate | None]  # a page's last fate in each tier


class _Run(NamedTuple):
    """Consecutive pages with one story."""

    first: int  # page
    last: int  # page after the last
    tier: str  # that gave them, or "computed"
    fates: tuple[Fate, ...]  # in the tiers before that one; of all three when they were computed

    @property
    def alike(self) -> tuple[Any, ...]:
        """Runs with equal values are one segment."""
        return (self.tier, *((fate.reason, fate.cause, fate.request_id) for fate in self.fates))


class _Case(NamedTuple):
    """A request at its admission; borders between pages.

    | 0 .. device: there | .. shared: loaded | .. matched: in host memory, not loaded | .. stranded: the same, in a pool
    that can't be used | .. limit: in no tier |
    """

    request: Request
    device: int
    shared: int
    matched: int
    stranded: int
    limit: int
    seen: dict[Tier, int]  # leading pages that another namespace of the tenant has
    usable: bool  # some host pool

    def borders(self) -> set[int]:
        """Where the story may change, the ghosts apart."""
        notes = [at for note in self.request.lookup_notes for at in (note.first, note.first + 1, note.last)]
        whole = (self.shared, self.matched, self.stranded, *self.request.prefetched, *self.seen.values(), *notes)
        return {at for at in whole if self.device < at < self.limit}


class Why:
    """The explanations of the last requests."""

    def __init__(self, state: State, host: HostMemory) -> None:
        self._state = state
        self._host = host
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by request id
        self._namespaces: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()  # seeds by tenant

    def of(self, request_ids: list[str]) -> list[dict[str, Any]]:
        """The explanations of those requests that are still known."""
        return [self._kept[request_id] for request_id in request_ids if request_id in self._kept]

    def admitted(self, request: Request, match: Match) -> None:
        """Explain a request that has just been given its path. A second time replaces the first: a load has failed."""
        if not self._state.settings.explain:
            return
        limit = (request.prompt_tokens - 1) // self._state.settings.page_size
        case = _Case(
            request,
            device=min(match.device_pages, limit),
            shared=min(request.shared, limit),
            matched=match.device_pages + match.host_pages,
            stranded=self._stranded(request, match),
            limit=limit,
            seen=self._elsewhere(request, limit),
            usable=any(pool.usable for pool in self._host.pools.values()),
        )
        known = self._state.ghosts.fates(self._digests(request, match, limit))
        changes = {case.device + at for at in range(1, len(known)) if known[at] != known[at - 1]}
        borders = sorted({case.device, limit} | changes | case.borders())
        runs = [_Run(0, case.device, "device", ())] if case.device else []
        recomputed = dict.fromkeys((*TIERS, "any"), 0)
        for first, last in pairwise(borders):
            told = known[first - case.device]
            runs.append(self._run(case, first, last, told))
            if runs[-1].tier == "computed":
                held = _held(told, first < case.matched)
                for name in held:
                    recomputed[name] += (last - first) * self._state.settings.page_size
        self._keep(request, runs, recomputed)

    def _digests(self, request: Request, match: Match, limit: int) -> list[bytes]:
        """Of the pages after those on the device."""
        tree = self._state.tree
        digests = [digest for node in match.host for digest in tree.digests(node)]
        parent = request.seed if match.end.is_root else tree.digests(match.end)[-1]
        start = (match.device_pages + match.host_pages) * tree.page_bytes
        rest = bytes(request.tokens[start : limit * tree.page_bytes])
        digests += chain(parent, rest, self._state.settings.page_size)
        return digests[: max(0, limit - match.device_pages)]

    # --- one run ------------------------------------------------------------------------------------------------

    def _run(self, case: _Case, first: int, last: int, known: Known) -> _Run:
        device, host, storage = known
        fetched = case.request.prefetched[0] <= first < case.request.prefetched[1]
        fates = [_fate(case, "device", device, first)]
        if first < case.shared and not fetched:
            return _Run(first, last, "host", tuple(fates))
        fates.append(self._host_fate(case, host, first))
        if first < case.shared:
            return _Run(first, last, "storage", tuple(fates))
        return _Run(first, last, "computed", (*fates, self._storage_fate(case, storage, first)))

    def _host_fate(self, case: _Case, known: Fate | None, at: int) -> Fate:
        if not self._state.settings.host_tier:
            return OFF
        if case.shared <= at < case.matched:
            return case.request.unloaded or NEVER_SEEN
        if case.matched <= at < case.stranded:
            return STORAGE_DOWN
        fate = _fate(case, "host", known, at)
        return STORAGE_DOWN if fate is NEVER_SEEN and not case.usable else fate

    def _storage_fate(self, case: _Case, known: Fate | None, at: int) -> Fate:
        note = case.request.lookup_note(at)
        if note is None:
            return known if known is not None and known.reason != "stored" else NOT_ASKED
        if note.reason != "never_seen":
            return Fate(note.reason, note.cause)
        if known is None:
            return NEVER_SEEN
        if known.reason != "stored":
            return known
        # L3 says how many leading pages it has: the first of the others is gone, of the rest nothing is known.
        return Fate("evicted", "by_storage", at=known.at) if at == note.first else BEHIND_GAP

    def _stranded(self, request: Request, match: Match) -> int:
        """Pages up to this one have a host copy in a pool that can't be used now."""
        first = match.device_pages + match.host_pages
        rest = bytes(request.tokens[first * self._state.tree.page_bytes :])
        for node, common in self._state.tree.peek(match.end, rest, len(rest) // self._state.tree.page_bytes):
            if node.host is None or node.host.pool.usable:
                break
            first += common
        return first

    # --- other namespaces ---------------------------------------------------------------------------------------

    def _elsewhere(self, request: Request, limit: int) -> dict[Tier, int]:
        """How many leading pages another namespace of the same tenant has, by tier. Other tenants' aren't looked at."""
        mine = self._namespaces.setdefault(request.tenant, OrderedDict())
        self._namespaces.move_to_end(request.tenant)
        mine[request.seed] = None
        mine.move_to_end(request.seed)
        if len(mine) > MAX_NAMESPACES:
            mine.popitem(last=False)
        if len(self._namespaces) > MAX_TENANTS:
            self._namespaces.popitem(last=False)
        seen: dict[Tier, int] = {}
        roots = [self._state.tree.roots.get(seed) for seed in mine if seed != request.seed]
        for root in filter(None, roots):
            held = self._held_below(root, bytes(request.tokens), limit)
            seen = {tier: max(held[tier], seen.get(tier, 0)) for tier in held}
        return seen

    def _held_below(self, root: Node, tokens: bytes, limit: int) -> dict[Tier, int]:
        held: dict[Tier, int] = {"device": 0, "host": 0}
        at = 0
        for node, common in self._state.tree.peek(root, tokens, limit):
            at += common
            held["device"] = at if node.value is not None else held["device"]
            held["host"] = at if node.host is not None else held["host"]
        return held

    # --- the whole ----------------------------------------------------------------------------------------------

    def _keep(self, request: Request, runs: list[_Run], recomputed: dict[str, int]) -> None:
        before = self._kept.pop(request.key.request_id, {}).get("recomputed_tokens", {})
        for name, tokens in recomputed.items():
            counter = "recomputed_tokens" if name == "any" else f"recomputed_{name}_tokens"
            self._state.counters[counter] += max(0, tokens - before.get(name, 0))
        self._kept[request.key.request_id] = {
            "request_id": request.key.request_id,
            "prompt_tokens": request.prompt_tokens,
            "page_size": self._state.settings.page_size,
            "recomputed_tokens": recomputed,
            "segments": self._segments(request, runs),
        }
        if len(self._kept) > MAX_EXPLANATIONS:
            self._kept.popitem(last=False)

    def _segments(self, request: Request, runs: list[_Run]) -> list[dict[str, Any]]:
        size, at = self._state.settings.page_size, 0
        segments: list[dict[str, Any]] = []
        for _, group in groupby(runs, key=lambda run: run.alike):
            alike = list(group)
            first, at = at, alike[-1].last * size
            if len(segments) < MAX_SEGMENTS:
                run = max(alike, key=lambda run: max((fate.at for fate in run.fates), default=0.0))
                missed = {tier: self._told(request, fate) for tier, fate in zip(TIERS, run.fates, strict=False)}
                segments.append({"from_token": first, "to_token": at, "tier": run.tier, "missed": missed})
            else:
                segments[-1] |= {"to_token": at, "tier": "mixed", "missed": {}}
        # What follows the last whole page, and at least one token, is always computed (TREE-02).
        rest = {"all": {"reason": "partial_page"}}
        return [*segments, {"from_token": at, "to_token": request.prompt_tokens, "tier": "computed", "missed": rest}]

    def _told(self, request: Request, fate: Fate) -> dict[str, Any]:
        told: dict[str, Any] = {"reason": fate.reason}
        if fate.cause:
            told["cause"] = fate.cause
        if fate.request_id and fate.seed == request.seed:
            told["request_id"] = fate.request_id
        if fate.at:
            told["seconds_ago"] = round(self._state.now - fate.at, 3)
        return told


def _fate(case: _Case, tier: Tier, known: Fate | None, at: int) -> Fate:
    return known or (OTHER_NAMESPACE if at < case.seen.get(tier, 0) else NEVER_SEEN)


def _held(known: Known, in_host: bool) -> list[str]:
    """The tiers that had a page before, and "any" of them."""
    held = [tier for tier, fate in zip(TIERS, known, strict=True) if fate is not None and fate.held]
    if in_host and "host" not in held:
        held.append("host")
    return [*held, "any"] if held else []
