"""What the managers of the core share."""

from collections import Counter

from services.scheduler.core.events import CPU, GPU, PeerKey, Send
from services.scheduler.core.ghosts import Ghosts, NoGhosts
from services.scheduler.core.leaves import Key
from services.scheduler.core.node import Node
from services.scheduler.core.operations import Operation, Operations
from services.scheduler.core.pages import HostPool, PagePool
from services.scheduler.core.publish import CacheEvents
from services.scheduler.core.regret import Window
from services.scheduler.core.reuse import Reuse
from services.scheduler.core.settings import CoreSettings
from services.scheduler.core.shares import Holdings, SharedLeaves
from services.scheduler.core.speeds import Speeds
from services.scheduler.core.strategies import ORDERS
from services.scheduler.core.tree import RadixTree
from services.scheduler.core.tree_holds import Lock
from shared.messages.common import Message


class State:
    """Tree, pools, operations, and the commands that one event has caused."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.now = 0.0
        self.outbox: list[Send] = []
        self.counters: Counter[str] = Counter()
        self.failures: list[Operation] = []  # given up during this event; the core deals with each once
        self.operations = Operations(self.outbox.append, self.failures.append)
        self.device = PagePool(1, 0)  # replaced when a worker group is there
        self.device.dead = True
        self.workers: list[PeerKey] = []  # the ranks of a complete, fenced group, else empty
        self.published = CacheEvents() if settings.events else None
        self.ghosts = Ghosts() if settings.explain else NoGhosts()
        self.holdings = Holdings(settings.namespace_share, self._pool) if settings.namespace_share < 1 else None
        heard = (self.ghosts if settings.explain else None, self.published, self.holdings)
        publishers = [each for each in heard if each is not None]
        self.order = ORDERS.get(settings.eviction, ORDERS["lru"])
        self.tree = RadixTree(settings.page_size, self.order, *publishers)
        self.reuse = Reuse(settings.page_size) if settings.eviction == "auto" else None
        if self.reuse is not None:
            self.tree.device_leaves = self.reuse.device_leaves
        if self.holdings is not None:
            self.tree.device_leaves = SharedLeaves(self.tree.device_leaves, self.order, self.holdings, GPU)
        self.window = Window(settings.page_size) if settings.explain else None
        self.speeds = Speeds(settings.page_size)
        self.space_freed = False  # host pages came free: waiting backups and prefetches may go on

    @property
    def ready(self) -> bool:
        """The worker group takes commands."""
        return bool(self.workers)

    def send(self, peer: PeerKey, message: Message) -> None:
        """Queue a message that is no operation."""
        self.outbox.append(Send(peer, message))

    def unlock(self, lock: Lock) -> None:
        """Release a lock; pages of removed nodes go back to the pool."""
        self.device.free(self.tree.unlock(lock))

    def _pool(self) -> PagePool:
        return self.device

    def add_host_pool(self, pool: HostPool) -> None:
        """Give a new host pool its evictable leaves."""
        if self.reuse is not None:
            pool.leaves = self.reuse.host_leaves(pool, small=pool.total < self.device.total)
        if self.holdings is not None:
            self.holdings.add_pool(pool)
            pool.leaves = SharedLeaves(pool.leaves, self.host_order, self.holdings, CPU)

    def host_order(self, node: Node) -> Key:
        """Which host copy goes first."""
        # Copies of resident nodes go first only when the host pool is the smaller one (TIER-09).
        pool = node.host.pool if node.host is not None else None
        small = pool is not None and pool.total < self.device.total
        return (int((node.value is not None) != small), *self.order(node))
