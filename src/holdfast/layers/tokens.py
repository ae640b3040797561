"""Tokens: who may come in, as whom, where, and for how long.

A token is `hf_<id>_<secret>`. The entry `tokens/<id>` of the store's own space holds the agent's name, the space, the role
and the sha256 of the secret: 256 random bits, so a plain hash of them tells nothing. The secret itself is shown once, when
the token is made, and is nowhere afterwards. Who made it and when are the entry's owner and time, and its ttl ends it.

`Tokens` makes, lists and revokes. `TokenBook` is what a server asks: every token in memory, kept fresh from the feed, so
that a check costs a hash and no waiting, and a revocation made anywhere takes effect at once.

How it fails. Whatever is wrong with a token (malformed, unknown, wrong, expired, revoked), the answer is one and the same
AuthenticationFailed, after the same comparison; nothing is remembered of it. An entry that is no token, because somebody
bypassed the library, is nobody's and is logged. A book that cannot read the feed keeps what it knows, logs that, and
tries again; it notices the end of a token by itself.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from holdfast.clock import Clock, Duration, optional_ms, sleep_or
from holdfast.codec import decode, encode
from holdfast.engine import OPERATIONS_MAX, Absent, Batch, Change, Delete, Engine, Entry, Page, Put, cursor_at
from holdfast.errors import AuthenticationFailed, Compacted, Damaged, Error, InvalidInput, NotFound
from holdfast.identity import (
    EVERY_SPACE,
    ROLES,
    TOKEN,
    TOKEN_ID,
    Identity,
    Role,
    Secret,
    check_agent,
    check_space,
)
from holdfast.keys import Subspace
from holdfast.layers.settings import SYSTEM_SPACE, make_system_space, names_of

TOKENS: Final = Subspace("tokens")
ID_BYTES: Final = 10
SECRET_BYTES: Final = 32
TOKEN_CHARS_MAX: Final = 256
"""Longer text is not even looked at."""
RETRY_MS: Final = 1_000
"""How long a book waits before it turns to a store again that could not be read."""

REFUSAL: Final = "the token is not valid: it is unknown, expired or revoked. Ask an administrator for a new one"
_NOBODY: Final = bytes(32)

log = logging.getLogger("holdfast.tokens")

Items = list


class Token(msgspec.Struct, frozen=True):
    """What may be known of a token. Instants are milliseconds since 1970."""

    id: str
    name: str
    space: str
    role: Role
    created_at: int
    expires_at: int | None
    created_by: str

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.role, self.space, self.id)


class _Stored(msgspec.Struct, frozen=True):
    """The value of an entry. The name of `secret_hash` keeps it out of the audit, like every secret."""

    name: str
    space: str
    role: Role
    secret_hash: str


class _Known(msgspec.Struct, frozen=True):
    """A token as it is compared."""

    token: Token
    hash: bytes
    identity: Identity

    def is_over(self, now: int) -> bool:
        return self.token.expires_at is not None and self.token.expires_at <= now


class Tokens:
    """The tokens of a store. `actor` is on whose behalf they are made and revoked."""

    def __init__(self, engine: Engine, clock: Clock, actor: str = "local") -> None:
        check_agent(actor)
        self._engine = engine
        self._clock = clock
        self._actor = actor

    async def create(
        self, name: str, space: str | None, role: Role, ttl: Duration | None = None
    ) -> tuple[Secret, Token]:
        """A new token for an agent. Its text is given here and never again.

        An agent and an orchestrator belong to one space; an administrator to all of them, and `space` is None or "*".
        """
        check_agent(name, await names_of(self._engine))
        where = checked_space(space, role)
        ttl_ms = optional_ms(ttl)
        id = _random(ID_BYTES)
        secret = _random(SECRET_BYTES)
        key = TOKENS.key(id)
        value = encode(_Stored(name, where, role, _hash(secret).hex()))
        await make_system_space(self._engine, None)
        batch = Batch(self._actor, (Put(key, value, ttl_ms),), (Absent(key),))
        at = (await self._engine.commit(SYSTEM_SPACE, batch)).at
        expires_at = None if ttl_ms is None else at + ttl_ms
        return Secret(f"hf_{id}_{secret}"), Token(id, name, where, role, at, expires_at, self._actor)

    async def list(self) -> Items[Token]:
        """Every token that is good, by space and name."""
        found = [known.token async for known in self._all()]
        return sorted(found, key=lambda token: (token.space, token.name, token.created_at, token.id))

    async def revoke(self, which: str, *, space: str | None = None) -> Items[Token]:
        """End a token by its id or its text, or all tokens of an agent by its name; NotFound when there is none.

        Two spaces may have agents of one name. `space` says whose is meant; without it such a name is refused.
        """
        if isinstance(which, str) and (pasted := TOKEN.fullmatch(which)):
            which = pasted[1]
        tokens = [token for token in await self.list() if space is None or token.space == space]
        found = [token for token in tokens if token.id == which] or [token for token in tokens if token.name == which]
        if not found:
            raise NotFound(
                f"there is no token with the id or name {_shown(which)}{_in(space)}; see holdfast token list"
            )
        spaces = sorted({token.space for token in found})
        if len(spaces) > 1:
            raise InvalidInput(
                f"agents called {which!r} have tokens in several spaces: {', '.join(spaces)}. Name the space, or give an id"
            )
        for start in range(0, len(found), OPERATIONS_MAX):
            deletes = tuple(Delete(TOKENS.key(token.id)) for token in found[start : start + OPERATIONS_MAX])
            await self._engine.commit(SYSTEM_SPACE, Batch(self._actor, deletes))
        return found

    async def authenticate(self, text: str) -> Identity:
        """Whom the token speaks for, as the store knows it now; AuthenticationFailed if it is not good."""
        id, given = _parts(text)
        [entry] = await self._engine.get(SYSTEM_SPACE, [TOKENS.key(id)])
        return _compared(_read(entry) if entry is not None else None, given, self._clock.now_ms())

    async def _all(self) -> AsyncIterator[_Known]:
        async for page in _pages(self._engine):
            for entry in page.entries:
                known = _read(entry)
                if known is not None:
                    yield known


class TokenBook:
    """Every token in memory, for a server. `async with TokenBook(engine, clock) as book:` keeps it fresh."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._cursor: str | None = None
        self._listeners: list[Callable[[str], None]] = []
        self._next_end: int | None = None
        self._sooner = asyncio.Event()
        """Set when a token may end before `_next_end`."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read all tokens, then follow what becomes of them."""
        await make_system_space(self._engine, None)
        await self._read_all()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._expire())]

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def __aenter__(self) -> TokenBook:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __len__(self) -> int:
        return len(self._known)

    def authenticate(self, text: str) -> Identity:
        """Whom the token speaks for; AuthenticationFailed if it is not good."""
        id, given = _parts(text)
        return _compared(self._known.get(id), given, self._clock.now_ms())

    def is_valid(self, identity: Identity) -> bool:
        """Whether the token that gave this identity is still good, and still gives the same."""
        known = self._known.get(identity.token_id)
        return (
            known is not None
            and (known.identity is identity or known.identity == identity)
            and not known.is_over(self._clock.now_ms())
        )

    def on_revoked(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Have a function called with the id of each token that ends, however it ends; gives a function that stops that."""
        self._listeners.append(callback)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(callback)

        return stop

    # --- keeping it fresh ---

    async def _read_all(self) -> None:
        """Take the tokens as they are. Pages may be of different moments: what was committed since the first is applied
        before anything counts, so a token that was revoked meanwhile is at no time good again."""
        fresh: dict[str, _Known] = {}
        start: int | None = None
        async for page in _pages(self._engine):
            start = page.revision if start is None else start
            for entry in page.entries:
                _enter(fresh, TOKENS.split(entry.key, 1)[0], _read(entry))
        cursor = cursor_at(start or 0)
        async for commit in self._engine.watch(SYSTEM_SPACE, TOKENS.root, cursor=cursor, live=False):
            for change in commit.changes:
                _apply(fresh, change, commit.at)
            cursor = commit.cursor
        before, self._known, self._cursor = self._known, fresh, cursor
        self._sooner.set()
        for id, known in before.items():
            if id not in fresh or fresh[id].identity != known.identity:
                self._tell(id)

    async def _follow(self) -> None:
        while True:
            try:
                async for commit in self._engine.watch(SYSTEM_SPACE, TOKENS.root, cursor=self._cursor):
                    for change in commit.changes:
                        self._heard(change, commit.at)
                    self._cursor = commit.cursor
            except Compacted:
                pass  # the feed goes on without us: read afresh
            except Exception as exc:
                self._complain(exc)
                await self._pause()
            await self._recover()

    async def _recover(self) -> None:
        while True:
            try:
                return await self._read_all()
            except Exception as exc:
                self._complain(exc)
            await self._pause()

    async def _pause(self) -> None:
        await self._clock.sleep_until(self._clock.now_ms() + RETRY_MS)

    def _complain(self, exc: Exception) -> None:
        what = exc.code if isinstance(exc, Error) else type(exc).__name__
        log.warning("the tokens cannot be followed (%s): those that are known stay, trying again", what)

    async def _expire(self) -> None:
        """Let go of tokens as they end; the store may write their expiry later."""
        while True:
            self._sooner.clear()
            ends = [known.token.expires_at for known in self._known.values() if known.token.expires_at is not None]
            self._next_end = min(ends, default=None)
            await sleep_or(self._clock, self._next_end, self._sooner)
            now = self._clock.now_ms()
            for known in [known for known in self._known.values() if known.is_over(now)]:
                self._known.pop(known.token.id, None)
                _log("a token has ended", known.token)
                self._tell(known.token.id)

    def _heard(self, change: Change, at: int) -> None:
        id = TOKENS.split(change.key, 1)[0]
        before = self._known.get(id)
        _apply(self._known, change, at)
        now = self._known.get(id)
        if before is None and now is not None:
            _log("a token was made", now.token, by=now.token.created_by)
        if before is not None and now is None:
            over = before.is_over(self._clock.now_ms())
            _log("a token has ended" if over else "a token was revoked", before.token)
        if before is not None and (now is None or now.identity != before.identity):
            self._tell(id)
        end = None if now is None else now.token.expires_at
        if end is not None and (self._next_end is None or end < self._next_end):
            self._sooner.set()

    def _tell(self, id: str) -> None:
        for callback in list(self._listeners):
            try:
                callback(id)
            except Exception:
                log.exception("what was to happen at the end of a token failed")


# --- in between ---


def _log(what: str, token: Token, **more: str) -> None:
    """Who may come in has changed. The id of a token is no secret."""
    log.info(what, extra={"id": token.id, "agent": token.name, "role": token.role, "space": token.space, **more})


def checked_space(space: str | None, role: Role) -> str:
    """The space a token of this role is for; InvalidInput if it cannot be."""
    if role not in ROLES:
        raise InvalidInput(f"a role is one of {', '.join(ROLES)}, not {role!r:.60}")
    if role == "admin":
        if space not in (None, EVERY_SPACE):
            raise InvalidInput("an administrator's token is for every space; name none, or give the role orchestrator")
        return EVERY_SPACE
    if space is None:
        raise InvalidInput(f"the role {role} belongs to a space; name it, with space= or --space")
    check_space(space)
    return space


def _random(size: int) -> str:
    """Random bytes as letters and digits; no '_' is among them."""
    return base64.b32encode(secrets.token_bytes(size)).decode().rstrip("=").lower()


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _parts(text: str) -> tuple[str, bytes]:
    """The id and the hash of the secret; whatever cannot be a token ends here."""
    match = TOKEN.fullmatch(text) if isinstance(text, str) and len(text) <= TOKEN_CHARS_MAX else None
    if match is None:
        raise AuthenticationFailed(REFUSAL)
    return match[1], _hash(match[2])


def _compared(known: _Known | None, given: bytes, now: int) -> Identity:
    same = hmac.compare_digest(given, _NOBODY if known is None else known.hash)
    if known is None or not same or known.is_over(now):
        raise AuthenticationFailed(REFUSAL)
    return known.identity


def _read(entry: Entry) -> _Known | None:
    id = TOKENS.split(entry.key, 1)[0]
    try:
        stored = decode(entry.value, _Stored)
        hash = bytes.fromhex(stored.secret_hash)
        if TOKEN_ID.fullmatch(id) is None or len(hash) != len(_NOBODY):
            raise ValueError("no token")
        check_agent(stored.name)
        if checked_space(stored.space, stored.role) != stored.space:
            raise ValueError("no space")
    except (InvalidInput, Damaged, ValueError):
        log.error("the entry %.60r of the store's own space is no token; nobody can use it", entry.key)
        return None
    token = Token(id, stored.name, stored.space, stored.role, entry.created_at, entry.expires_at, entry.owner)
    return _Known(token, hash, token.identity)


def _enter(tokens: dict[str, _Known], id: str, known: _Known | None) -> None:
    if known is None:
        tokens.pop(id, None)
    else:
        tokens[id] = known


def _apply(tokens: dict[str, _Known], change: Change, at: int) -> None:
    """What one change of the feed does to the tokens."""
    id = TOKENS.split(change.key, 1)[0]
    known = None
    if change.exists:
        known = _read(Entry(change.key, change.value, 0, change.owner, at, at, change.expires_at))
    _enter(tokens, id, known)


async def _pages(engine: Engine) -> AsyncIterator[Page]:
    after: str | None = None
    while True:
        page = await engine.scan(SYSTEM_SPACE, TOKENS.root, after=after)
        yield page
        if not page.more:
            return
        after = page.entries[-1].key


def _shown(which: str) -> str:
    """What was asked for, unless it is a token itself: that is kept out of messages."""
    return repr(Secret(which)) if isinstance(which, str) and which.startswith("hf_") else repr(which)[:80]


def _in(space: str | None) -> str:
    return "" if space is None else f" in space {space!r}"
