"""The configuration: one TOML file decoded into these structs. Unknown keys and bad values are refused by name.

`docs/operations.md` lists every key. A key can also be set by an environment variable, KVTIDE_CACHE_PAGE_SIZE=32, and
with `--set cache.page_size=32`: the file gives way to the environment, the environment to `--set`.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.errors import ConfigError
from shared.geometry import HostLayout

GIB = 2**30
VARIABLE_PREFIX = "KVTIDE_"  # of the environment variables that set keys

PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Key = Annotated[str, Meta(min_length=1)]  # an empty one would match a request that names none
Port = Annotated[int, Meta(ge=0, le=65535)]


Backend = Literal["hash_file", "file", "memory", "lmcache", "mooncake", "dynamic", "none"]
SCHEDULER = r"^[A-Za-z0-9_-]{1,31}@(tcp|ipc)://.+$"  # IDENTITY@ENDPOINT
ADDRESS = r"^([^\s:/]+:[0-9]{1,5})?$"
Eviction = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "auto"]
HostPath = Literal["auto", "map", "remote"]
Endpoint = Annotated[str, Meta(pattern=r"^((tcp|ipc)://.+)?$")]
IMPORT_PATH = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$"


class _Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class Run(_Section):
    """Where the processes of one stack meet."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")] = "kvtide"  # of the stack; two need two names
    folder: str = ""  # sockets and logs; empty = a private folder under the temporary directory
    scheduler_endpoint: str = ""  # ZeroMQ endpoint; empty = an ipc:// socket in `folder`
    keys_folder: str = ""  # made by `kvtide keys`: TCP links are encrypted and both ends proven; empty = in the clear
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # least level that is logged
    log_format: Literal["text", "json"] = "text"  # of a log line: key=value pairs, or a JSON object
    traces_endpoint: Annotated[str, Meta(pattern=r"^(https?://.+)?$")] = (
        ""  # OpenTelemetry collector (OTLP over HTTP), e.g. http://127.0.0.1:4318/v1/traces; empty = no traces
    )


class Model(_Section):
    """The model and its numbers."""

    path: str = ""  # Hugging Face folder; empty = the default model, SmolLM2-135M-Instruct
    name: str = ""  # what the API calls it; empty = the folder's name
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of weights and KV cache
    max_context: Count = 0  # tokens; 0 = the model's own limit


class Cache(_Section):
    """Pages and tiers."""

    page_size: Annotated[int, Meta(ge=1, le=1024)] = 64  # tokens, a power of two
    device_tokens: PositiveInt = 16384  # tokens in the device pool (L1)
    host_bytes: Count = 2 * GIB  # bytes of the host pool (L2) of each storage; 0 = no host tier, hence no L3
    host_layout: HostLayout = "page_first_direct"  # order of the bytes of a page in host memory and L3
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = (
        "write_through"  # back a node up at its first use, at its second, or when the device evicts it
    )
    eviction: Eviction = "lru"  # what leaves device and host first
    namespace_share: Share = 1.0  # of device and host that a namespace (tenant) keeps while others need room
    pin_bytes: Count = 0  # bytes of pages that pins hold, on device and host together; 0 = a quarter of the device pool
    load_policy: Literal["threshold", "auto"] = (
        "threshold"  # load what host or L3 have by its length alone, or only if measured to be faster than computing it
    )
    load_back_threshold: Count = 10  # tokens; a shorter host hit is recomputed
    prefetch: bool = True  # ask L3 when a request arrives
    prefetch_threshold: Count = 256  # tokens; a shorter L3 hit is recomputed
    prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = (
        "timeout"  # when a request stops waiting for L3
    )
    explain: bool = True  # remember why pages left and what came, for `kvtide why`, bad investments and live regret
    checksums: bool = True  # False only to show what the oracle catches without them


class Scheduler(_Section):
    """Admission and batching."""

    max_running: PositiveInt = 16  # requests in a step
    max_queued: PositiveInt = 1024  # requests waiting; more are answered 429
    token_budget: PositiveInt = 512  # prompt tokens computed in a step
    request_timeout_s: Seconds = 600.0  # longest life of a request


class Worker(_Section):
    """GPU worker processes."""

    threads: Count = 0  # compute threads; 0 = one for each core
    device: Literal["cpu"] = "cpu"  # where the model runs
    host_path: HostPath = "auto"  # to host pages: mapped memory, ZeroMQ, or the first that works


class Storage(_Section):
    """Storage services."""

    segment_folder: str = "/dev/shm"  # host-pool segments; must be memory
    schedulers: tuple[
        Annotated[str, Meta(pattern=SCHEDULER)], ...
    ] = ()  # IDENTITY@ENDPOINT of every scheduler that shares it, see containers.md; empty = run.scheduler_endpoint
    pages_endpoint: Endpoint = ""  # where workers that can't map it get pages, e.g. tcp://0.0.0.0:5701; empty = nowhere
    pages_advertise: Endpoint = ""  # where workers find pages_endpoint if not there, as behind a proxy; empty = there
    backend: Backend = "hash_file"  # the L3 store, see backends.md
    folder: str = ""  # page files (L3); empty = "l3" in the cache folder
    key_file: str = ""  # a secret: pages that were written without it are misses, see security.md; empty = all are read
    quota_bytes: PositiveInt = 10 * GIB  # bytes of pages that `hash_file`, `file` and `memory` keep
    free_floor_bytes: Count = GIB  # bytes that stay free on the file system
    io_threads: PositiveInt = 2  # pages read or written at once
    direct_writes: bool = True  # page files go past the kernel's cache; false = they stay in free memory for a while
    fsync: bool = False  # wait until the disk has a page before it counts as stored; false = a power cut may lose some
    address: Annotated[str, Meta(pattern=ADDRESS)] = (
        ""  # host:port of the `lmcache` server or the `mooncake` master; empty = their usual ports on 127.0.0.1
    )
    dynamic_class: Annotated[str, Meta(pattern=IMPORT_PATH)] = ""  # module:Class of the `dynamic` store
    options: dict[str, Any] = {}  # what the `dynamic` class or `mooncake` takes besides
    timeout_s: Seconds = 2.0  # longest call of a store; three failures in a row detach it for a while

    def endpoints(self) -> dict[str, list[str]]:
        """`schedulers` by identity; empty when none is named."""
        found: dict[str, list[str]] = {}
        for each in self.schedulers:
            identity, _, endpoint = each.partition("@")
            found.setdefault(identity, []).append(endpoint)
        return found


class Gateway(_Section):
    """The HTTP side."""

    host: str = "127.0.0.1"  # address to listen on
    port: Port = 8000  # 0 = any free port
    api_keys: tuple[Key, ...] = ()  # empty = no key is asked for
    admin_keys: tuple[Key, ...] = ()  # for POST /kvtide/admin/...; empty = nobody may


class Events(_Section):
    """KV events: which tier has which pages. They hold prompts' tokens: whoever can connect reads them."""

    endpoint: Endpoint = ""  # where the scheduler publishes them, e.g. tcp://127.0.0.1:5557; empty = nowhere
    replay_endpoint: Endpoint = ""  # where subscribers ask for what they have missed; empty = nowhere
    topic: str = "kv-events"  # first frame of each message


class Config(_Section):
    """Everything that a stack needs to know."""

    run: Run = Run()
    model: Model = Model()
    cache: Cache = Cache()
    scheduler: Scheduler = Scheduler()
    worker: Worker = Worker()
    storage: Storage = Storage()
    gateway: Gateway = Gateway()
    events: Events = Events()

    @property
    def run_folder(self) -> Path:
        """Folder of sockets and logs, private to the user."""
        if self.run.folder:
            return Path(self.run.folder)
        return Path(os.environ.get("TMPDIR", "/tmp")) / f"kvtide-{os.getuid()}" / self.run.name

    @property
    def scheduler_endpoint(self) -> str:
        """ZeroMQ endpoint that the scheduler binds."""
        return self.run.scheduler_endpoint or f"ipc://{self.run_folder}/scheduler.sock"

    @property
    def storage_folder(self) -> Path:
        """Folder of page files."""
        return Path(self.storage.folder) if self.storage.folder else cache_folder() / "l3"


def cache_folder() -> Path:
    """Where kvtide keeps what it can make again: the converted model, page files."""
    explicit = os.environ.get("KVTIDE_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtide"


def load_config(
    path: Path | None = None, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """Read a TOML file (or start from the defaults), then apply the environment, then overrides.

    overrides: such as "cache.page_size=32". environment: os.environ unless given; KVTIDE_<SECTION>_<KEY> counts.
    Raises ConfigError naming the key and what is allowed.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"can't read the configuration {path}: {error.strerror}; check the path") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from None
    for name, text in sorted((os.environ if environment is None else environment).items()):
        _apply_variable(data, name, text)
    for override in overrides:
        _apply(data, override)
    return _convert(data)


def environment_variable(section: str, key: str) -> str:
    """The name of the variable that sets a key."""
    return f"{VARIABLE_PREFIX}{section}_{key}".upper()


def _apply_variable(data: dict[str, Any], variable: str, text: str) -> None:
    for section in Config.__struct_fields__:
        start = environment_variable(section, "")
        if not variable.startswith(start):
            continue
        key = variable.removeprefix(start).lower()
        known = type(getattr(Config(), section)).__struct_fields__
        if key not in known:
            names = ", ".join(environment_variable(section, each) for each in known)
            raise ConfigError(f"the environment variable {variable} names no key; those of [{section}] are {names}")
        _apply(data, f"{section}.{key}={text}")


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"x = {text.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # an unquoted string
    table = data.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section!r} is not a section; the sections are {', '.join(Config.__struct_fields__)}")
    table[name] = value


def _convert(data: dict[str, Any]) -> Config:
    for section, table in data.items():
        if section not in Config.__struct_fields__:
            raise ConfigError(f"unknown section {section!r}; the sections are {', '.join(Config.__struct_fields__)}")
        known = type(getattr(Config(), section)).__struct_fields__
        for key in table if isinstance(table, dict) else ():
            if key not in known:
                raise ConfigError(f"unknown key {section}.{key}; the keys of [{section}] are {', '.join(known)}")
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        detail, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`") or "configuration"
        raise ConfigError(f"bad value for {key}: {detail}") from None
    size = config.cache.page_size
    if size & (size - 1):
        raise ConfigError(f"bad value for cache.page_size: {size} is not a power of two")
    _check_storage(config.storage)
    if config.events.replay_endpoint and not config.events.endpoint:
        raise ConfigError("events.replay_endpoint is for what events.endpoint publishes, which is empty: set both")
    return config


def _check_storage(storage: Storage) -> None:
    backend = storage.backend
    if backend == "dynamic" and not storage.dynamic_class:
        raise ConfigError('storage.backend "dynamic" needs storage.dynamic_class, such as "mypackage.store:MyStore"')
    if storage.pages_advertise and not storage.pages_endpoint:
        raise ConfigError(
            "storage.pages_advertise says where storage.pages_endpoint is found, which is empty: set both"
        )
    if storage.dynamic_class and backend != "dynamic":
        raise ConfigError(f'storage.dynamic_class is for storage.backend "dynamic", which is "{backend}"')
    if storage.options and backend not in ("dynamic", "mooncake"):
        raise ConfigError(f'storage.options is for the backends "dynamic" and "mooncake", not for "{backend}"')
    if storage.address and backend not in ("lmcache", "mooncake"):
        raise ConfigError(f'storage.address is for the backends "lmcache" and "mooncake", not for "{backend}"')


def encode_config(config: Config) -> str:
    """The configuration as JSON, for handing it to a child process."""
    return msgspec.json.encode(config).decode()


def decode_config(text: str) -> Config:
    """The inverse of `encode_config`."""
    return msgspec.json.decode(text, type=Config)
