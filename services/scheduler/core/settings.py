"""What the core is told at its start, and its bounds with their reasons."""

from typing import Literal, NamedTuple

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
LoadPolicy = Literal["threshold", "auto"]
Eviction = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "auto"]

WORKER_WAIT_S = 30.0  # a request that comes before any worker waits this long: a worker starts in about 5 s
LOOKUP_TIMEOUT_S = 2.0  # an existence check is a dictionary lookup: 2 s means that the storage is in trouble
PREFETCH_BASE_S = 2.0  # stop policy "timeout": 2 s + 0.1 s per 1,024 tokens, at most 30 s
PREFETCH_PER_1024_TOKENS_S = 0.1
PREFETCH_MAX_S = 30.0
MAX_LOOKUPS = 3  # how often a request asks or joins a lookup before it computes what is missing

STEP_TIMEOUT_S = 60.0  # a step of a full token budget takes about 2 s on a slow CPU
TRANSFER_TIMEOUT_S = 10.0  # a copy of 64 pages takes 0.1 s; L3 I/O of a batch about 1 s
ASK_AGAIN_S = 0.5  # after a message was lost: what is behind it on the way may be the answer; a connection is made anew
MAX_SENDS = 3  # a command is sent at most this often, then its outcome is in doubt
MAX_HURRIES = 16  # times that a command is sent again because something was lost; a peer may be unable to decode it
MAX_STEP_FAILURES = 3  # a request whose step failed this often is refused with a retryable error
MAX_LOAD_FAILURES = 3  # a request whose loads failed this often computes what it lacks
MAX_BACKLOG = 4096  # commands that wait for a credit of one peer; the oldest backup is dropped beyond

SLOW_START_S = 30.0  # until a new storage's room counts in full: it doesn't get every new page at once
INVENTORY_CHUNK = 1024  # pages asked for at once: 36 KB on the wire

PREFETCH_SHARE = 0.25  # of a host pool that prefetches may hold
ARCHIVE_SHARE = 0.25  # of a host pool that archiving may pin
MAX_WAITING_BACKUPS = 256  # nodes that wait for host pages; more are left for their next hit

WRITE_THRESHOLDS = {"write_through": 1, "write_through_selective": 2}  # hits before a backup


class CoreSettings(NamedTuple):
    """The scheduler's share of the configuration."""

    page_size: int = 64  # tokens
    write_policy: WritePolicy = "write_through"
    eviction: Eviction = "lru"
    namespace_share: float = 1.0  # of each tier that a namespace keeps while others need room
    pin_bytes: int = 0  # that pins hold on device and host together; 0 = a quarter of the device pool
    load_policy: LoadPolicy = "threshold"
    load_back_threshold: int = 10  # tokens
    prefetch: bool = True
    prefetch_threshold: int = 256  # tokens
    prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    host_tier: bool = True  # a storage is expected
    max_running: int = 16  # requests
    max_queued: int = 1024  # requests
    token_budget: int = 512  # tokens computed in a step
    request_timeout_s: float = 600.0
    tp_size: int = 1  # worker ranks
    forget_storage_s: float = 600.0  # silence after which a storage is forgotten: a host restarts within 5 minutes
    events: bool = False  # collect KV events: `Core.events`
    explain: bool = True  # remember why pages left each tier, and explain each request's misses
    identity: str = "scheduler"  # whose lease the storages hold
    adoption: bool = False  # a new scheduler goes on with the pages of the one before; storages must know ListPages
