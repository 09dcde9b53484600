"""The L3 backend that the configuration names, behind its circuit breaker."""

from pathlib import Path

from services.storage import lmcache_store, mooncake_store
from services.storage.backend import Backend
from services.storage.breaker import BreakerBackend
from services.storage.dynamic import make_dynamic
from services.storage.file_backend import FileBackend
from services.storage.hash_file import HashFileBackend
from services.storage.key_value import KeyValueStore
from services.storage.lmcache_store import LmcacheStore
from services.storage.memory_store import MemoryStore
from services.storage.mooncake_store import MooncakeStore
from services.storage.none_backend import NoneBackend
from services.storage.page_batch import Policy
from services.storage.page_key import read_key
from services.storage.sealed import SealedBackend
from shared.config import Config
from shared.errors import StorageError

RUNS = "runs"  # folder of the runs' own folders, beside the models'


def make_backend(config: Config, identity: str) -> Backend:
    """The backend of the storage `identity`. Raises StorageError when what it needs isn't installed."""
    if config.storage.backend == "none":
        return NoneBackend()
    return BreakerBackend(_make(config, identity), config.storage.timeout_s)


def _make(config: Config, identity: str) -> Backend:
    storage, verify = config.storage, config.cache.checksums
    policy = Policy(verify, storage.direct_writes, storage.fsync)
    key = read_key(Path(storage.key_file)) if storage.key_file else b""
    bounds = (storage.quota_bytes, storage.free_floor_bytes, storage.io_threads)
    match storage.backend:
        case "hash_file":
            return HashFileBackend(config.storage_folder, *bounds, policy=policy, key=key)
        case "file":
            folder = config.storage_folder / RUNS / f"{config.run.name}-{identity}"
            return FileBackend(folder, *bounds, policy=policy)
        case "dynamic":
            return make_dynamic(
                storage.dynamic_class, storage.options, storage.timeout_s, storage.io_threads, verify=verify, key=key
            )
    store = _make_store(config)
    return SealedBackend(storage.backend, store, storage.timeout_s, storage.io_threads, verify=verify, key=key)


def _make_store(config: Config) -> KeyValueStore:
    storage = config.storage
    match storage.backend:
        case "lmcache":
            return LmcacheStore(storage.address or lmcache_store.ADDRESS)
        case "mooncake":
            address = storage.address or mooncake_store.ADDRESS
            try:
                return MooncakeStore(address, storage.io_threads, **storage.options)
            except TypeError as error:
                raise StorageError(f"storage.options {storage.options} aren't Mooncake's: {error}") from None
    return MemoryStore(storage.quota_bytes)
