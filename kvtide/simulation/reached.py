"""What a few thousand seeds must reach: a simulation that never loads a bad page proves nothing about bad pages."""

from kvtide.simulation.plan import DURING, EVICTIONS, FAULT_KINDS
from services.scheduler.core.request import RequestState

OF_THE_NETWORK = (
    "message_lost", "message_doubled", "message_late", "message_kept", "old_epoch_at_peer", "old_epoch_at_scheduler",
    "scheduler_lost", "superseded", "replica", "lease_refused", "storage_joined", "peer_heard_again", "peers_lost",
    "peers_exited", "answered_again", "asked_while_running", "late_answers",
    "storages_forgotten", "forgotten_storage_back", "pages_in_doubt", "copied_after_cancel", "rank_failed_alone",
    "loss_noticed",
    *(f"fault during {kind}" for kind in DURING if kind),
)  # fmt: skip
OF_REQUESTS = (
    "request finished", "request aborted", "request gateway lost", "request scheduler lost", "request rejected 400",
    "request rejected 429", "request rejected 503", "request tried again",
    "request of a namespace", "request with priority", "request of a later turn",
    "retracted", "step_failed_error", "step_failed_load", "step_failed_order",
    *(f"abort_{state.value}" for state in RequestState if state is not RequestState.QUEUED),  # none rests there
)  # fmt: skip
OF_TIERS = (
    "device_hit", "host_hit", "storage_hit", "backup_pages", "backup_failed", "backup_dropped_waiting",
    "backup_dropped_no_host_page", "load_back_pages", "load_back_failed", "load_failed_checksum", "load_failed_error",
    "device_evicted_pages", "host_evicted_pages", "archive_ended_pages", "archive_dropped_pages", "lookups",
    "prefetch_pages", "prefetch_taken_pages", "prefetch_timed_out", "prefetch_dropped_no_room",
    "write_back_pages", "write_back_waited", "orphaned_pages", "adopted_pages", "orphans_evicted_pages",
    "prefetch_dropped_no_host_page", "prefetch_corrupt_pages", "l3_corrupt_read", "segment_refused", "map_failed",
    "prefetch_dropped_slower", "load_back_dropped_slower", "events_replayed", "l3_quota_dropped", "l3_truncated",
)  # fmt: skip
OF_SHAPES = (
    "policy write_through", "policy write_through_selective", "policy write_back", "ranks 1", "ranks 2",
    *(f"eviction {name}" for name in EVICTIONS), "storages 0", "storages 1", "storages 2", "storages 3",
    "page size 1", "page size 2", "page size 4", "host pool smaller than device", "two steps in flight",
    "prefetch off", "prefetch best_effort", "prefetch wait_complete", "prefetch timeout",
    "one L3 of several storages", "an L3 for each storage", "without adoption", "shares of namespaces",
)  # fmt: skip
REQUIRED = (*FAULT_KINDS, *OF_SHAPES, *OF_THE_NETWORK, *OF_REQUESTS, *OF_TIERS)
