"""Why a prompt's tokens were computed: for each part of it the tier that gave it, and the fate of the page elsewhere.

An explanation is made at admission, from the tree, the ghosts and what the request's lookups have told.
"""

from collections import OrderedDict
from itertools import groupby
from typing import Any, NamedTuple

from services.scheduler.core.ghosts import TIERS, Fate, Tier
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.node import Node
from services.scheduler.core.request import Request
from services.scheduler.core.settings import MAX_LOAD_FAILURES
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


class _Page(NamedTuple):
    """One page of a prompt."""

    tier: Tier | str  # that gave it, or "computed"
    fates: tuple[Fate, ...]  # in the tiers before that one; of all three when it was computed

    @property
    def alike(self) -> tuple[Any, ...]:
        """Pages with equal values are one segment."""
        return (self.tier, *((fate.reason, fate.cause, fate.request_id) for fate in self.fates))


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
        size = self._state.settings.page_size
        limit = (request.prompt_tokens - 1) // size
        device, shared = min(match.device_pages, limit), min(request.shared, limit)
        pages = [_Page("device", ())] * device
        digests = self._digests(request, match, limit)
        seen = self._elsewhere(request, limit)
        stranded = self._stranded(request, match)
        for at in range(device, limit):
            fates = [self._fate("device", digests[at - device], seen, at)]
            storage = request.prefetched[0] <= at < request.prefetched[1]
            if at >= shared or storage:
                fates.append(self._host_fate(request, match, digests[at - device], seen, at, stranded))
            if at >= shared:
                fates.append(self._storage_fate(request, digests[at - device], at))
            tier = "computed" if at >= shared else "storage" if storage else "host"
            pages.append(_Page(tier, tuple(fates)))
        self._keep(request, pages, self._recomputed(digests, device, shared, match))

    def _digests(self, request: Request, match: Match, limit: int) -> list[bytes]:
        """Of the pages after those on the device."""
        tree = self._state.tree
        digests = [digest for node in match.host for digest in tree.digests(node)]
        parent = request.seed if match.end.is_root else tree.digests(match.end)[-1]
        start = (match.device_pages + match.host_pages) * tree.page_bytes
        rest = bytes(request.tokens[start : limit * tree.page_bytes])
        digests += chain(parent, rest, self._state.settings.page_size)
        return digests[: max(0, limit - match.device_pages)]

    # --- one page in one tier -----------------------------------------------------------------------------------

    def _fate(self, tier: Tier, digest: bytes, seen: dict[Tier, int], at: int) -> Fate:
        known = self._state.ghosts.fate(tier, digest)
        return known or (OTHER_NAMESPACE if at < seen.get(tier, 0) else NEVER_SEEN)

    def _host_fate(
        self, request: Request, match: Match, digest: bytes, seen: dict[Tier, int], at: int, stranded: int
    ) -> Fate:
        if not self._state.settings.host_tier:
            return OFF
        matched = match.device_pages + match.host_pages
        if request.shared <= at < matched:
            gave_up = request.load_failures >= MAX_LOAD_FAILURES
            return Fate("failed", "load_back") if gave_up else Fate("below_threshold", "load_back_threshold")
        if matched <= at < stranded:
            return STORAGE_DOWN
        fate = self._fate("host", digest, seen, at)
        usable = any(pool.usable for pool in self._host.pools.values())
        return STORAGE_DOWN if fate is NEVER_SEEN and not usable else fate

    def _storage_fate(self, request: Request, digest: bytes, at: int) -> Fate:
        note = request.lookup_note(at)
        known = self._state.ghosts.fate("storage", digest)
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

    def _recomputed(self, digests: list[bytes], device: int, shared: int, match: Match) -> dict[str, int]:
        """Tokens that are computed though a tier had them before, by tier; "any" of them."""
        size, found = self._state.settings.page_size, dict.fromkeys((*TIERS, "any"), 0)
        for at in range(shared, device + len(digests)):
            fates = {tier: self._state.ghosts.fate(tier, digests[at - device]) for tier in TIERS}
            held = [tier for tier, fate in fates.items() if fate is not None and fate.held]
            if at < match.device_pages + match.host_pages and "host" not in held:
                held.append("host")
            for name in [*held, "any"] if held else ():
                found[name] += size
        return found

    def _keep(self, request: Request, pages: list[_Page], recomputed: dict[str, int]) -> None:
        before = self._kept.pop(request.key.request_id, {}).get("recomputed_tokens", {})
        for name, tokens in recomputed.items():
            counter = "recomputed_tokens" if name == "any" else f"recomputed_{name}_tokens"
            self._state.counters[counter] += max(0, tokens - before.get(name, 0))
        self._kept[request.key.request_id] = {
            "request_id": request.key.request_id,
            "prompt_tokens": request.prompt_tokens,
            "page_size": self._state.settings.page_size,
            "recomputed_tokens": recomputed,
            "segments": self._segments(request, pages),
        }
        if len(self._kept) > MAX_EXPLANATIONS:
            self._kept.popitem(last=False)

    def _segments(self, request: Request, pages: list[_Page]) -> list[dict[str, Any]]:
        size, at = self._state.settings.page_size, 0
        segments: list[dict[str, Any]] = []
        for _, group in groupby(pages, key=lambda page: page.alike):
            alike = list(group)
            end = at + len(alike) * size
            if len(segments) < MAX_SEGMENTS:
                page = max(alike, key=lambda page: max((fate.at for fate in page.fates), default=0.0))
                missed = {tier: self._told(request, fate) for tier, fate in zip(TIERS, page.fates, strict=False)}
                segments.append({"from_token": at, "to_token": end, "tier": page.tier, "missed": missed})
            else:
                segments[-1] |= {"to_token": end, "tier": "mixed", "missed": {}}
            at = end
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
