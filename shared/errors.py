"""The errors of kvtide. Each message says what was wrong, the value, and what to do."""


class KvtideError(Exception):
    """Base of every error that kvtide raises on purpose."""


class ConfigError(KvtideError):
    """A configuration key or value is refused."""


class ModelError(KvtideError):
    """A model folder is unsupported, incomplete or damaged."""


class GeometryError(KvtideError):
    """Two sides disagree on what a page's bytes are."""


class ProtocolError(KvtideError):
    """A message is malformed, of another protocol version, or not allowed here."""


class SegmentError(KvtideError):
    """A host-pool segment can't be created, mapped or trusted."""


class StorageError(KvtideError):
    """An L3 backend can't do what was asked."""


class CapacityError(KvtideError):
    """Memory or disk is too small for what the configuration asks."""


class TraceError(KvtideError):
    """A trace of requests can't be read or replayed."""


class IntegrityError(KvtideError):
    """A page is in two places or in none: a bug, named by page and pool."""
