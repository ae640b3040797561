"""How far a reader has come in a space: the revision that its next session read must show at least.

A view of a space has one. It advances with what the view commits and with what its session reads show; strong and eventual
reads leave it as it is. Its token is short text that can be handed to another process, whose view then sees at least
as much: `store.space("contoso", session=token)`.
"""

from __future__ import annotations

from typing import Final

from holdfast.errors import InvalidInput

DIGITS_MAX: Final = 19


class Session:
    """The revision that a view of a space has seen."""

    __slots__ = ("seen", "space")

    def __init__(self, space: str = "", seen: int = 0) -> None:
        self.space = space
        self.seen = seen

    @classmethod
    def of(cls, space: str, token: str | None) -> Session:
        """The session of a token, which must be of this space; without one, a session that has seen nothing."""
        session = cls(space)
        if token is not None:
            session.join(token)
        return session

    @property
    def token(self) -> str:
        """What another process needs to see at least as much: `space@revision`."""
        return f"{self.space}@{self.seen}"

    def join(self, token: str) -> None:
        """See at least what another session has seen, besides what this one has."""
        space, at, digits = token.rpartition("@") if isinstance(token, str) else ("", "", "")
        if not at or not digits.isascii() or not digits.isdigit() or len(digits) > DIGITS_MAX:
            raise InvalidInput(f"{token!r:.60} is no token of a session; take it from space.session.token")
        if space != self.space:
            raise InvalidInput(f"the token is of a session in space {space!r:.60}, and this is {self.space!r}")
        self.saw(int(digits))

    def saw(self, revision: int) -> None:
        if revision > self.seen:
            self.seen = revision

    def __repr__(self) -> str:
        return f"<Session {self.token}>"
