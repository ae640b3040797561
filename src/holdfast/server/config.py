"""The keeper's configuration: one YAML file in document D's shape, with or without its root key, and more keys of ours.

    store: resident:/var/lib/holdfast/team.db
    listen: {binary: "127.0.0.1:7420", http: "127.0.0.1:7421"}
    policies:
      rate_limits:
        - {agent_pattern: "*", max_ops_per_second: 100, burst: 200}

`load` gives a Config or InvalidDocument with the place of every mistake (`documents.py`); docs/reference/keeper-config.md
lists every key. Durations are seconds or "250ms", "90s", "5m", "1h"; sizes are bytes or "512 KB", "10 MB", "1 GB", where a
KB is 1024 bytes, an MB 1024 KB and a GB 1024 MB. Relative paths count from the folder of the file.

`ConfigFile` follows the file: on `reload()` and by itself when the file changes or is replaced. A new file that is wrong
changes nothing: the old settings stay, `last_error` and the log say why. Settings that a running keeper cannot change stay
as they were at the start, and are named in `pending` until it is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import yaml

from holdfast.clock import Clock, SystemClock
from holdfast.engine import Durability
from holdfast.engines.private import make_folder
from holdfast.engines.registry import file_of, split_url
from holdfast.errors import Error, InvalidInput, NotFound
from holdfast.identity import AgentNames, check_space
from holdfast.middleware.rules import MB, AccessRule, Quota, RateLimit, Rules
from holdfast.server.documents import BYTES_MAX, MISSING, Expected, InvalidDocument, Leaf, Reading, is_null, parse
from holdfast.server.http.limits import LOCK_TTL_MS_MAX
from holdfast.server.leaves import KB, Address, address, duration, pattern, positive, sized, store, unix_path, whole

ROOT: Final = "state_keeper_config"
"""The key that document D puts around everything."""
DEFAULT_FILE: Final = ".holdfast/store.db"
POLL_MS: Final = 1_000
FRAME_BYTES_MIN: Final = 64 * KB
FRAME_BYTES_MAX: Final = 24 * MB
UNIX_PATH_BYTES_MAX: Final = 107
"""What the system takes as the path of a socket."""
CONNECTIONS_MAX: Final = 1_000_000

log = logging.getLogger("holdfast.config")

CheckVerb = Callable[[str], object]
"""Raises InvalidInput for a verb that access rules do not know."""


class Persistence(msgspec.Struct, frozen=True, rename={"snapshot_interval_ms": "snapshot_interval"}):
    """Document D's words for where the state is kept."""

    enabled: bool = True
    wal_path: str | None = None
    snapshot_interval_ms: int = 300_000


class Listen(msgspec.Struct, frozen=True):
    """Where the keeper can be reached; None turns one off."""

    binary: Address | None = Address("127.0.0.1", 7420)
    http: Address | None = Address("127.0.0.1", 7421)
    unix: str | None = None


class Tls(msgspec.Struct, frozen=True):
    """Files in PEM, for both ports. With `client_ca` a client needs a certificate of that authority."""

    certificate: str
    key: str
    client_ca: str | None = None


class Limits(msgspec.Struct, frozen=True, rename={"idle_ms": "idle"}):
    """What is too much: connections in all, requests under way on one of them, bytes of a request, silence; and of the
    connections, how many may not have said who they are, be of one token, and come besides, if they are administrators'."""

    connections: int = 1024
    in_flight: int = 256
    frame_bytes: int = FRAME_BYTES_MAX
    idle_ms: int = 300_000
    connections_before_hello: int = 512
    connections_per_token: int = 256
    connections_for_administrators: int = 16


class SpaceSettings(msgspec.Struct, frozen=True):
    """What a space is made with; None leaves one that exists as it is, and makes a new one that syncs and notes no reads."""

    durability: Durability | None = None
    audit_reads: bool | None = None


class MetricsSettings(msgspec.Struct, frozen=True):
    """Whether there is a /metrics, and whether it needs no token."""

    enabled: bool = True
    public: bool = False


class LogSettings(msgspec.Struct, frozen=True):
    """What is logged to stderr, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "text"


class Config(msgspec.Struct, frozen=True, rename={"timeout_default_ms": "timeout_default"}):
    """All settings of a keeper. `store` is always a URL once it was loaded."""

    store: str | None = None
    listen: Listen = Listen()
    tls: Tls | None = None
    insecure: bool = False
    persistence: Persistence = Persistence()
    policies: Rules = Rules()
    consistency: Literal["strong"] = "strong"
    timeout_default_ms: int = 5_000
    agent_names: AgentNames | None = None
    limits: Limits = Limits()
    spaces: dict[str, SpaceSettings] = {}
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()


LIVE: Final = frozenset({"policies", "timeout_default_ms", "limits", "spaces", "log"})
"""What a running keeper changes; everything else needs a restart."""


def defaults(folder: Path | None = None) -> Config:
    """The configuration of a keeper without a file: loopback only, its store below the folder, here unless told otherwise."""
    return Config(store=f"resident:{(folder or Path.cwd()).absolute() / DEFAULT_FILE}")


def load(path: str | Path, *, check_verb: CheckVerb | None = None) -> Config:
    """The configuration in a file; InvalidDocument with every mistake and its place, NotFound if there is no file."""
    file = Path(path)
    try:
        with file.open("rb") as source:
            data = source.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no configuration file {file}") from None
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InvalidInput(f"the configuration file {file} cannot be read: {reason}") from exc
    return read(data, str(path), folder=file.absolute().parent, check_verb=check_verb)


def read(data: bytes, name: str, *, folder: Path, check_verb: CheckVerb | None = None) -> Config:
    """The configuration in the bytes of a file of that name, in that folder."""
    node = parse(name, data)
    reading = Reading(name, _leaves(check_verb))
    config = reading.struct(_inside_root(reading, node), Config)
    reading.finish()
    if config is MISSING:  # pragma: no cover (a mistake was noted then)
        raise AssertionError("a configuration was refused without a reason")
    resolved = _resolved(reading, config, folder)
    reading.finish()
    return resolved


def _inside_root(reading: Reading, node: yaml.MappingNode) -> yaml.Node:
    """With document D's root key everything is inside of it."""
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value == ROOT:
            for other, _ in node.value:
                if other is not key:
                    reading.wrong(other, "", f"stands beside {ROOT}; with that key everything is inside of it")
            if is_null(value):
                reading.wrong(value, ROOT, "expected keys and values, got nothing")
            return value  # type: ignore[no-any-return]
    return node


# --- what types do not say ---


def _leaves(check_verb: CheckVerb | None) -> dict[tuple[type, str], Leaf]:
    def verb(value: Any) -> str:
        if not isinstance(value, str):
            raise Expected("a verb such as Get")
        if check_verb is not None and value != "*":
            check_verb(value)
        return value

    return {
        (Config, "store"): store,
        (Config, "timeout_default_ms"): duration,
        (Config, "spaces"): check_space,
        (Persistence, "snapshot_interval_ms"): duration,
        (Listen, "binary"): address,
        (Listen, "http"): address,
        (Listen, "unix"): unix_path,
        (Limits, "connections"): whole(1, CONNECTIONS_MAX),
        (Limits, "connections_before_hello"): whole(1, CONNECTIONS_MAX),
        (Limits, "connections_per_token"): whole(1, CONNECTIONS_MAX),
        (Limits, "connections_for_administrators"): whole(0, CONNECTIONS_MAX),
        (Limits, "in_flight"): whole(1, CONNECTIONS_MAX),
        (Limits, "frame_bytes"): sized(FRAME_BYTES_MIN, FRAME_BYTES_MAX),
        (Limits, "idle_ms"): duration,
        (AccessRule, "agent_pattern"): pattern,
        (AccessRule, "allow"): verb,
        (AccessRule, "deny"): verb,
        (RateLimit, "agent_pattern"): pattern,
        (RateLimit, "max_ops_per_second"): positive,
        (RateLimit, "burst"): whole(1),
        (Quota, "agent_pattern"): pattern,
        (Quota, "max_keys_per_agent"): whole(0),
        (Quota, "max_value_size"): sized(1),
        (Quota, "max_total_size"): sized(1),
    }


# --- what only the whole says ---


def _resolved(reading: Reading, config: Config, folder: Path) -> Config:
    """Paths made absolute, the store decided, and what contradicts itself refused."""
    persistence, listen, tls = config.persistence, config.listen, config.tls
    if config.store is not None and persistence.wal_path is not None:
        reading.wrong_at("store", "persistence.wal_path names the store's file as well; keep one of them")
    if config.store is not None and not persistence.enabled:
        reading.wrong_at(
            "store", "persistence.enabled is false, which keeps the state in memory alone; keep one of them"
        )
    if listen == Listen(None, None, None):
        reading.wrong_at("listen", "everything is turned off; leave one of binary, http and unix on")
    if listen.binary is not None and listen.binary == listen.http and listen.http.port:
        reading.wrong_at("listen.http", f"binary listens on {listen.binary} already; choose another port")
    for name, at in (("binary", listen.binary), ("http", listen.http)):
        if at is not None and not at.is_loopback and tls is None and not config.insecure:
            reading.wrong_at(
                f"listen.{name}",
                f"{at} can be reached from other machines, and without tls everybody on the way can read tokens and "
                "state; add tls, listen on 127.0.0.1, or write insecure: true if the network itself is safe",
            )
    unix = None if listen.unix is None else str(folder / Path(listen.unix).expanduser())
    if unix is not None and len(os.fsencode(unix)) > UNIX_PATH_BYTES_MAX:
        reading.wrong_at("listen.unix", f"{unix} is longer than {UNIX_PATH_BYTES_MAX} bytes; choose a shorter path")
    if tls is not None:
        tls = Tls(
            _file(reading, "tls.certificate", tls.certificate, folder),
            _file(reading, "tls.key", tls.key, folder),
            None if tls.client_ca is None else _file(reading, "tls.client_ca", tls.client_ca, folder),
        )
    if config.timeout_default_ms > LOCK_TTL_MS_MAX:
        reading.wrong_at("timeout_default", f"a lock is held for at most {LOCK_TTL_MS_MAX // 86_400_000} days")
    url = _store_url(config, folder)
    return msgspec.structs.replace(config, store=url, tls=tls, listen=msgspec.structs.replace(listen, unix=unix))


def _store_url(config: Config, folder: Path) -> str:
    if not config.persistence.enabled:
        return "memory:"
    if config.persistence.wal_path is not None:
        return f"resident:{folder / Path(config.persistence.wal_path).expanduser()}"
    if config.store is None:
        return f"resident:{folder / DEFAULT_FILE}"
    scheme, rest = split_url(config.store)
    if scheme not in ("sqlite", "resident"):
        return config.store
    return f"{scheme}:{folder / Path(rest.removeprefix('//')).expanduser()}"


def _file(reading: Reading, path: str, name: str, folder: Path) -> str:
    found = folder / Path(name).expanduser()
    if not found.is_file() or not os.access(found, os.R_OK):
        reading.wrong_at(path, f"there is no file {found} that can be read")
    return str(found)


def make_folders(path: str | Path, config: Config) -> None:
    """What is missing of the folders that a file names; InvalidDocument with the place of one that cannot be made."""
    file = None if config.store is None else file_of(config.store)
    named = "store" if config.persistence.wal_path is None else "persistence.wal_path"
    for key, needed in ((named, file), ("listen.unix", config.listen.unix and Path(config.listen.unix))):
        if needed:
            try:
                make_folder(needed.parent)
            except OSError as exc:
                why = f"the folder {needed.parent} cannot be made: {exc.strerror}; make it, or name another"
                raise _refused(Path(path), key, why) from exc


def _refused(path: Path, key: str, message: str) -> InvalidDocument:
    """A value that was read and turned out to be of no use, at its place."""
    reading = Reading(str(path), _leaves(None))
    reading.struct(_inside_root(reading, parse(str(path), path.read_bytes())), Config)
    reading.wrong_at(key, message)
    return InvalidDocument(reading.name, reading.problems[-1:])


# --- following the file ---


class ConfigFile:
    """A configuration file and what it says now. `on_change` is called with the new settings, when they are new."""

    def __init__(
        self,
        path: str | Path,
        on_change: Callable[[Config], object],
        *,
        clock: Clock | None = None,
        check_verb: CheckVerb | None = None,
    ) -> None:
        self.path = Path(path)
        self.last_error: str | None = None
        """Why the file as it is now is not in force; None when it is."""
        self.pending: tuple[str, ...] = ()
        """Settings that differ from those in force, and need a restart."""
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._check_verb = check_verb
        self._stamp = self._stamped()
        self._started = self.config = load(self.path, check_verb=check_verb)
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look at the file every second."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def reload(self) -> bool:
        """Read the file now; whether what it says is in force."""
        self._stamp = self._stamped()
        self._turn += 1
        return self._use(self._load())

    async def reload_aside(self) -> bool:
        """The same, without keeping the event loop waiting while a large file is read."""
        self._stamp = self._stamped()
        self._turn += 1
        turn, new = self._turn, await asyncio.to_thread(self._load)
        if turn != self._turn:
            return self.last_error is None  # somebody has read a newer file meanwhile
        return self._use(new)

    def about(self, key: str, message: str) -> str:
        """What there is to say about a value, with its place in the file."""
        try:
            return str(_refused(self.path, key, message))
        except (Error, OSError):  # somebody is writing another one
            return f"{self.path}: {key}: {message}"

    def _load(self) -> Config | Error:
        try:
            return load(self.path, check_verb=self._check_verb)
        except Error as exc:
            return exc

    def _use(self, new: Config | Error) -> bool:
        """Put new settings in force, or say why not."""
        try:
            if isinstance(new, Error):
                raise new
            in_force = msgspec.structs.replace(
                new, **{name: getattr(self._started, name) for name in Config.__struct_fields__ if name not in LIVE}
            )
            if in_force != self.config:
                self._on_change(in_force)
        except Exception as exc:
            self.last_error = str(exc) if isinstance(exc, Error) else f"the new settings failed: {type(exc).__name__}"
            log.error(
                "the new configuration is not used and the old one stays: %s",
                self.last_error,
                exc_info=not isinstance(exc, Error),
            )
            return False
        changed, was_wrong = differing(self.config, in_force), self.last_error is not None
        self.config, self.last_error = in_force, None
        self.pending = differing(self._started, new, live=False)
        if was_wrong:
            log.info("the configuration was corrected and is in force again")
        if changed:
            log.info("the configuration was reloaded: %s changed", ", ".join(changed))
        elif not was_wrong and not self.pending:
            log.info("the configuration was read anew: nothing changed")
        if self.pending:
            log.warning("%s changed in the file and needs a restart", ", ".join(self.pending))
        return True

    async def _follow(self) -> None:
        """A file is read when it has been the same for two looks: whoever writes it slowly is not read halfway."""
        before = self._stamp
        while True:
            await self._clock.sleep_until(self._clock.now_ms() + POLL_MS)
            now = self._stamped()
            if now == before and now != self._stamp:
                await self.reload_aside()
            before = now

    def _stamped(self) -> tuple[int, int, int, int] | None:
        try:
            found = os.stat(self.path)
        except (OSError, ValueError):
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def differing(old: Config, new: Config, *, live: bool = True) -> tuple[str, ...]:
    """The settings in which two configurations differ, as people write them; those that need a restart, or the others."""
    paths = []
    for field in msgspec.structs.fields(Config):
        one, two = getattr(old, field.name), getattr(new, field.name)
        if one == two or (field.name in LIVE) != live:
            continue
        if isinstance(one, Listen):
            paths += [f"listen.{name}" for name in one.__struct_fields__ if getattr(one, name) != getattr(two, name)]
        else:
            paths.append(field.encode_name)
    return tuple(paths)
