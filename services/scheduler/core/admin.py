"""What an administrator asks for while the stack runs: flush, drain, and changes of a storage's L3."""

from functools import partial
from typing import Literal

import numpy as np

from services.scheduler.core.events import PeerKey
from services.scheduler.core.ghosts import Fate
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.operations import Control
from services.scheduler.core.pages import HostPool
from services.scheduler.core.pins import Pins
from services.scheduler.core.state import State
from shared.messages.common import OperationFailed
from shared.messages.gateway import Administer, Administered
from shared.messages.storage import BackendChanged, ChangeBackend
from shared.page_hash import namespace_seed

FLUSHED, DRAINED = Fate("evicted", "flush"), Fate("evicted", "drain")


class Admin:
    """Each action is answered once: at once, or when the storages have answered."""

    def __init__(self, state: State, host: HostMemory) -> None:
        self._state = state
        self._host = host
        self.pins = Pins(state)

    def carry_out(self, asker: PeerKey, wish: Administer) -> None:
        """Do it, and tell the asker."""
        pools = {key: pool for key, pool in self._host.pools.items() if wish.storage in ("", pool.storage_id)}
        if wish.storage and not pools:
            known = ", ".join(sorted(pool.storage_id for pool in self._host.pools.values())) or "none"
            self._answer(asker, wish, f"there is no storage {wish.storage!r}; there are: {known}")
            return
        match wish.action:
            case "pin":
                self._pin(asker, wish)
            case "unpin":
                ended = self.pins.remove(wish.pin)
                self._answer(asker, wish, "" if ended else f"there is no pin {wish.pin}, or it has ended")
            case "flush" if wish.storage:
                self._answer(asker, wish, "a flush is of every tier of the stack: name no storage")
            case "flush":
                self._answer(asker, wish, "", self._flush())
            case "drain" | "undrain" if not wish.storage:
                self._answer(asker, wish, f"say which storage to {wish.action}")
            case "drain" | "undrain":
                (pool,) = pools.values()
                pool.draining = wish.action == "drain"
                if pool.draining:
                    self.pins.leave(pool)
                self._state.space_freed = True
                self.go_on()
                self._answer(asker, wish, "", {"host_pages": pool.cached})
            case "attach" | "detach" | "clear":
                self._change(asker, wish, wish.action, list(pools))

    def go_on(self) -> None:
        """Take what can go out of pools that are drained; copies of L3 stay."""
        for pool in self._host.pools.values():
            if pool.draining and pool.usable:
                self._host.empty(pool, DRAINED)

    def _pin(self, asker: PeerKey, wish: Administer) -> None:
        names = wish.namespace
        done = self.pins.add(namespace_seed(names.tenant, names.lora_id, names.extra_key), wish.tokens, wish.ttl_s)
        if isinstance(done, str):
            self._answer(asker, wish, done)
        else:
            self._answer(asker, wish, "", {"pin": done[0], "pages": done[1]})

    # --- flush --------------------------------------------------------------------------------------------------

    def _flush(self) -> dict[str, int]:
        """Forget every page in device and host memory that nothing uses. What runs keeps its path, L3 its pages."""
        before = self._cached()
        with self._state.ghosts.because(FLUSHED):
            for root in list(self._state.tree.roots.values()):
                self._flush_below(root)
            for pool in self._host.pools.values():
                self._flush_orphans(pool)
        after = self._cached()
        self._state.counters["flushes"] += 1
        self._state.space_freed = True
        return {name: count - after[name] for name, count in before.items()} | {"kept_pages": sum(after.values())}

    def _flush_below(self, root: Node) -> None:
        """A lock is on every node from its own to the root: where there is none, there is none below."""
        waiting = list(root.children.values())
        while waiting:
            node = waiting.pop()
            if node.lock_ref:
                waiting += node.children.values()
                continue
            removed = self._state.tree.detach(node)
            self._state.device.free(removed.device)
            self._host.release(removed.host)

    def _flush_orphans(self, pool: HostPool) -> None:
        digests, pages = list(pool.orphans), pool.orphaned
        pool.orphans.clear()
        self._state.ghosts.note("host", digests, "evicted", "flush")
        self._host.release([HostSpan(pool, np.asarray(pages, np.int32))])

    def _cached(self) -> dict[str, int]:
        tree = self._state.tree
        host = sum(pool.cached + len(pool.orphans) for pool in self._host.pools.values())
        return {"device_pages": tree.evictable + tree.protected, "host_pages": host}

    # --- L3 -----------------------------------------------------------------------------------------------------

    def _change(
        self, asker: PeerKey, wish: Administer, change: Literal["attach", "detach", "clear"], storages: list[PeerKey]
    ) -> None:
        refusals: dict[PeerKey, str] = {}

        def changed(storage: PeerKey, message: object) -> None:
            match message:
                case BackendChanged(refusal=told):
                    pass
                case OperationFailed(reason=reason) if reason != "lost":
                    told = f"it failed ({reason}): see its log"
                case _:
                    told = "it was lost"
            refusals.setdefault(storage, told)
            if len(refusals) == len(storages):
                bad = [f"{each.identity}: {refusal}" for each, refusal in sorted(refusals.items()) if refusal]
                self._answer(asker, wish, "; ".join(bad), {"storages": len(storages) - len(bad)})

        if not storages:
            self._answer(asker, wish, "there is no storage")
        for storage in storages:
            if self._state.operations.is_lost(storage):
                changed(storage, None)
                continue
            message = ChangeBackend(self._state.operations.new_id(), change)
            operation = Control(on_done=partial(changed, storage))
            self._state.operations.start(operation, message, [storage])

    def _answer(self, asker: PeerKey, wish: Administer, refusal: str, figures: dict[str, int] | None = None) -> None:
        self._state.send(asker, Administered(wish.question, refusal, figures or {}))
