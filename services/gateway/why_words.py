"""A miss in words: what /kvtide/why, `kvtide why` and the dashboard say of a reason and its cause."""

from typing import Any

REASONS = {
    "never_seen": "never seen",
    "evicted": "evicted",
    "dropped": "not kept",
    "timed_out": "no answer in time",
    "corrupted": "corrupted",
    "failed": "a copy failed",
    "lost": "lost with its process",
    "behind_gap": "behind a missing page",
    "other_namespace": "only in another namespace of the same tenant",
    "below_threshold": "too short to be worth a copy",
    "slower": "slower than recompute",
    "not_admitted": "not admitted",
    "storage_down": "no storage can be used",
    "not_asked": "not asked: a tier above had it, or it was asked often enough",
    "off": "off",
    "partial_page": "the rest of the prompt: the last token, and what fills no page, is always computed",
}
CAUSES = {
    "admission": "to admit another request",
    "write_backup": "for a backup of other pages",
    "prefetch": "for a prefetch of other pages",
    "orphaned": "they were an earlier scheduler's",
    "flush": "by an administrator's flush",
    "drain": "an administrator drained the storage",
    "by_storage": "by the storage itself: it had the page",
    "waiting": "too many backups were waiting",
    "no_host_page": "no host page could be freed",
    "archive_queue": "the queue to L3 was full",
    "not_stored": "the storage did not take it",
    "no_room": "prefetches held their share of the pool",
    "dismissed": "an older request needed the memory",
    "lookup": "the lookup's deadline",
    "load_back": "found when it was loaded",
    "load_back_threshold": "cache.load_back_threshold",
    "prefetch_threshold": "cache.prefetch_threshold",
    "write_policy": "used too seldom for cache.write_policy to copy it",
    "storage": "a storage ended",
    "gpu_worker": "a GPU worker ended",
    "backend": "storage.backend is none",
    "host_bytes": "cache.host_bytes is 0",
    "lookups": "it was asked often enough",
}
OF_REASON = {  # causes that mean something else after these reasons
    ("timed_out", "prefetch"): "the prefetch's deadline",
    ("corrupted", "prefetch"): "found when it was fetched",
    ("failed", "prefetch"): "L3 could not be read",
    ("failed", "write_backup"): "its backup",
    ("failed", "load_back"): "its load",
    ("slower", "load_back"): "the load, as speeds were measured",
    ("slower", "prefetch"): "fetch and load, as speeds were measured",
    ("behind_gap", "load_back"): "the load of one before it failed",
    ("off", "prefetch"): "cache.prefetch",
}


def words(fate: dict[str, Any]) -> str:
    """One phrase for a tier's miss."""
    reason, cause = fate["reason"], fate.get("cause", "")
    text = REASONS.get(reason, reason.replace("_", " "))
    if "seconds_ago" in fate:
        text += f" {fate['seconds_ago']:.3g} s earlier"
    why = OF_REASON.get((reason, cause)) or CAUSES.get(cause, cause.replace("_", " "))
    if "request_id" in fate:
        why = why.replace("another request", fate["request_id"]).replace("other pages", fate["request_id"])
    return f"{text}: {why}" if why else text
