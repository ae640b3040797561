"""Which store, which space, on whose behalf: what every command needs, found in options, environment and folders.

An option wins over its environment variable, and that over the default. The default store is `.holdfast/store.db` in the
project: the nearest folder, from here upwards, that has a `.holdfast` or a `.git`; else the folder one is in. The folder
is made by the first command that writes, for its user alone and with a .gitignore in it. A command that only reads makes nothing: where there is
no store it says so, so a mistyped path does not become an empty store.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.cli import output
from holdfast.engines.private import make_folder
from holdfast.engines.registry import KEEPERS, shown_url, split_url
from holdfast.engines.registry import file_of as file_of
from holdfast.errors import AccessDenied, InvalidInput, NotFound, Unavailable
from holdfast.identity import EVERY_SPACE
from holdfast.space import Space, check_agent, check_space
from holdfast.store import Store, open

FOLDER: Final = ".holdfast"
FILE: Final = "store.db"
SPACE: Final = "default"
AGENT: Final = "cli"


class Session(msgspec.Struct, frozen=True):
    """The options every command has; None is what was not given."""

    given_store: str | None = None
    given_space: str | None = None
    given_agent: str | None = None
    json: bool = False
    given_token: str | None = None

    def refined(
        self, store: str | None, space: str | None, agent: str | None, json: bool, token: str | None
    ) -> Session:
        """The same, with what was given nearer to the command."""
        given = {"given_store": store, "given_space": space, "given_agent": agent, "given_token": token}
        changes = {name: text for name, text in given.items() if text is not None}
        return msgspec.structs.replace(self, json=self.json or json, **changes)

    def __repr__(self) -> str:
        return f"<Session {self.given_store} {self.given_space} {self.given_agent}>"  # never the token

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("store", self.given_store), ("space", self.given_space), ("agent", self.given_agent)]

    @property
    def space_name(self) -> str:
        return _or(self.named_space, SPACE)

    @property
    def named_space(self) -> str | None:
        """The space, if somebody named one."""
        return _chosen(self.given_space, "HOLDFAST_SPACE")

    @property
    def agent(self) -> str:
        return _or(self._named_agent, AGENT)

    @property
    def _named_agent(self) -> str | None:
        if self.given_agent == "":
            raise InvalidInput("--agent is empty; name an agent, or leave it out")
        return _chosen(self.given_agent, "HOLDFAST_AGENT")

    def agent_in(self, store: Store) -> str:
        """On whose behalf to act there: a keeper knows who is asking."""
        return self._named_agent or (AGENT if store.identity is None else store.identity.agent)

    def space_in(self, store: Store) -> str:
        """The space meant there: a keeper's token is of one, unless it is an administrator's."""
        if store.identity is None or store.identity.space == EVERY_SPACE:
            return self.space_name
        return self.named_space or store.identity.space

    @property
    def url(self) -> str:
        return self._named_store or str(default_store())

    @property
    def _named_store(self) -> str | None:
        """The store, if somebody named one; an empty name is nobody's wish."""
        if self.given_store == "":
            raise InvalidInput("--store is empty; name a file or a URL, or leave it out")
        return self.given_store or os.environ.get("HOLDFAST_STORE")

    @asynccontextmanager
    async def store(self, *, create: bool = False, background: bool = False) -> AsyncIterator[Store]:
        """The store, open. Only with `create` may it be a new one; with `background` it is looked after as long as it is open."""
        if create:
            self.make_folder()
        if self.given_token is not None and not _is_keeper(self.url):
            raise InvalidInput("--token is for a keeper, such as holdfast://host:7420; this store takes none")
        token = self.token_for(self.url)
        async with opened(self.url, create=create, json=self.json, token=token, background=background) as store:
            yield store

    def make_folder(self) -> None:
        """Make the folder of the project's store, if that is the one that is meant."""
        if not self._named_store:
            _make_folder(default_store().parent)

    def to_serve(self) -> str:
        """The store for a keeper, which owns it: a file is kept in memory as well."""
        scheme, rest = split_url(self.url)
        if scheme in KEEPERS:
            named = "--store" if self.given_store else "HOLDFAST_STORE"
            raise InvalidInput(
                f"{named} names a keeper, {shown_url(self.url)}, and serving needs a store of its own: "
                "name a file or a database with --store, or leave both out for the one of this project"
            )
        self.make_folder()
        return f"resident:{rest}" if scheme == "sqlite" else self.url

    def token_for(self, url: str) -> str | None:
        """The token to show there; only a keeper is shown one."""
        if self.given_token == "":
            raise InvalidInput("--token is empty; give a token, or leave it out")
        return _chosen(self.given_token, "HOLDFAST_TOKEN") if _is_keeper(url) else None

    @asynccontextmanager
    async def space(self, *, create: bool = False, background: bool = False) -> AsyncIterator[Space]:
        """The space, in its open store."""
        check_space(self.space_name)
        check_agent(self.agent)
        async with self.store(create=create, background=background) as store:
            yield await self.view(store)

    async def view(self, store: Store) -> Space:
        """The space, in a store that is open."""
        space = store.space(self.space_in(store), agent=self.agent_in(store))
        if store.identity is not None:  # who looks at it through a keeper sees what everybody sees
            return space
        for info in await store.engine.spaces(space.name):
            if info.durability == "volatile":
                output.note(
                    f"space {space.name!r} is volatile: each process that opens this store has its own, "
                    "so what others wrote is not here",
                    self.json,
                )
        return space


@asynccontextmanager
async def opened(
    url: str,
    *,
    create: bool = False,
    json: bool = False,
    token: str | None = None,
    background: bool = False,
    blobs: str | None = None,
) -> AsyncIterator[Store]:
    """A store, mostly without background work: a command does one thing and ends."""
    path = file_of(url)
    if path is not None and not create and not path.exists():
        raise NotFound(f"there is no store at {path}; the first write, such as holdfast set, makes one")
    async with open(url, durability=None, background=background, token=token, blobs=blobs) as store:
        if split_url(url)[0] == "memory":
            output.note("a memory: store begins empty and ends with this command", json)
        yield store


def check_admin(store: Store, what: str) -> None:
    """Refuse at once what a keeper would refuse half-way, in words about a part of it."""
    who = store.identity
    if who is not None and who.role != "admin":
        raise AccessDenied(
            f"{what} is for administrators; this token is that of {who.agent!r}, {who.role} in {who.space!r}"
        )


def default_store() -> Path:
    """Where the store of this project is, whether it exists or not."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if os.path.isdir(folder / FOLDER) or os.path.exists(folder / ".git"):  # also where we may not look
            return folder / FOLDER / FILE
    return here / FOLDER / FILE


def _make_folder(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as exc:
        raise Unavailable(
            f"the folder {folder} cannot be made ({exc.strerror}); name another place with --store"
        ) from exc


def _chosen(given: str | None, variable: str) -> str | None:
    return given if given is not None else os.environ.get(variable) or None


def _is_keeper(url: str) -> bool:
    return split_url(url)[0] in KEEPERS


def _or(chosen: str | None, default: str) -> str:
    return default if chosen is None else chosen
