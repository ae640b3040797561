"""Secrets stay out of audit, logs and events.

A field is secret when its name says so: `password`, `api_key`, `accessToken`, `client-secret`; a record is secret when
one of its key's elements does, or when its key matches a pattern given to `open(redact=Redaction(keys=["vault/*"]))`. The
value of what is secret is replaced; names stay, so that one still sees what was changed. A token of a keeper is secret
wherever it stands, in any text: `hf_<id>_…` is left of it. Watchers with the right to read see the truth: the feed is not
redacted. What one process declares secret holds for all (`settings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from typing import Any, Final

from holdfast.codec import decode
from holdfast.errors import InvalidInput
from holdfast.identity import hidden

REDACTED: Final = "[redacted]"
DEPTH_MAX: Final = 64
JUDGED_MAX: Final = 4096
"""Names of fields that were looked at and are remembered; most values have the same few."""
SECRET_WORDS: Final = frozenset(
    {
        "password",
        "passwd",
        "passphrase",
        "passcode",
        "pwd",
        "secret",
        "secrets",
        "token",
        "credential",
        "credentials",
        "cookie",
    }
    | {
        "authorization",
        "apikey",
        "api_key",
        "access_key",
        "private_key",
        "secret_key",
        "session_key",
        "signing_key",
        "ssh_key",
    }
    | {
        "encryption_key",
        "connection_string",
        "access_token",
        "auth_token",
        "refresh_token",
        "bearer_token",
        "api_token",
    }
    | {"session_token"}
)
SECRET_NAMES: Final = frozenset({"auth", "bearer", "jwt", "otp"})
"""Secret where they are all of a name; as a part of one (`auth_method`, `jwt_expiry`) they tell of something else."""
NAME_CHARS_MAX: Final = 256
"""A longer name with a suspicious beginning of a word in it is secret."""
BEGINNING_CHARS: Final = 5
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+")
_COUNTED: Final = "token"
"""The one of the words whose plural is no secret: of those a model is billed by."""


class Redaction:
    """Which names and keys are secret: the defaults, and what is added."""

    def __init__(self, *, fields: Iterable[str] = (), keys: Iterable[str] = ()) -> None:
        self.fields: set[str] = set()
        self.keys: set[str] = set()
        self.add(fields, keys)

    def add(self, fields: Iterable[str], keys: Iterable[str]) -> None:
        """More names and patterns; nothing is ever taken away."""
        fields, keys = _texts(fields, "fields", "iban"), _texts(keys, "keys", "vault/*")
        self.fields |= fields
        self.keys |= keys
        self._judged: dict[str, bool] = {}
        self._words = {"".join(_words(word)) for word in SECRET_WORDS | self.fields} - {""}
        self._endings = tuple({"".join(_words(word)) for word in SECRET_WORDS} - {"pwd"})
        self._patterns = [re.compile(translate(pattern)) for pattern in sorted(self.keys)]
        # Most names contain the beginning of no secret word; one search tells. In lower case: to ignore it takes five times as long.
        names = {field.lower() for field in self.fields}  # also such as are no words
        known = SECRET_WORDS | SECRET_NAMES | self.fields
        beginnings = {word[0][:BEGINNING_CHARS] for word in map(_words, known) if word} | {"pass"}
        self._suspects = re.compile("|".join(map(re.escape, sorted(beginnings | names)))).search
        short = [
            each for each in beginnings | names if not any(other in each for other in (beginnings | names) - {each})
        ]
        self._beginnings = (*short, "hf_", "\\")

    def is_secret_field(self, name: str) -> bool:
        known = self._judged.get(name)
        if known is None:
            known = self._judge(name)
            if len(self._judged) < JUDGED_MAX and len(name) <= NAME_CHARS_MAX:
                self._judged[name] = known
        return known

    def _judge(self, name: str) -> bool:
        if self._suspects(name.lower()) is None:
            return False
        if len(name) > NAME_CHARS_MAX or name in self.fields:
            return True
        words = _words(name)
        if "".join(words) in SECRET_NAMES:
            return True
        runs = ("".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1))
        return any(map(self._is_secret_word, runs)) or any(word.endswith(self._endings) for word in words)

    def _is_secret_word(self, word: str) -> bool:
        return word in self._words or (word[-1] == "s" and word[:-1] != _COUNTED and word[:-1] in self._words)

    def is_secret_key(self, key: str) -> bool:
        if self._patterns and any(pattern.match(key) for pattern in self._patterns):
            return True
        return self._suspects(key.lower()) is not None and any(map(self.is_secret_field, key.split("/")))

    def value(self, key: str, value: Any) -> Any:
        """A record's value as it may be shown."""
        return REDACTED if self.is_secret_key(key) else self._inside(value, 0)

    def read(self, key: str, data: bytes) -> Any:
        """The same of an encoded value."""
        return REDACTED if self.is_secret_key(key) else self.disclosed(data)

    def disclosed(self, data: bytes, plain: bool = False) -> Any:
        """An encoded value whose key is no secret. Most have nothing in them that even looks like one: they are not walked through.

        `plain` says that this is known of it (`is_plain`).
        """
        value: Any = decode(data)
        if _may_be_deep(data) or not (plain or self._is_plain(data.decode())):
            return self._inside(value, 0)
        return value

    def is_plain(self, text: str | None) -> bool:
        """Whether nothing in it even looks like a secret key, a secret field or a token, of however many keys and values it is."""
        return text is not None and not self._patterns and self._is_plain(text)

    def _is_plain(self, text: str) -> bool:
        return not any(map(text.lower().__contains__, self._beginnings))

    def _inside(self, value: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            return REDACTED  # too deep to look into, so nobody knows what it holds
        kind = type(value)
        if kind is str:
            return hidden(value)
        if kind is dict:
            return {
                hidden(name): REDACTED if self.is_secret_field(name) else self._inside(item, depth + 1)
                for name, item in value.items()
            }
        return [self._inside(item, depth + 1) for item in value] if kind is list else value


def _texts(given: Iterable[str], what: str, example: str) -> set[str]:
    """Names or patterns as somebody gave them. One text would be taken for its letters, each of them a name."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidInput(f"{what} must be a list of texts, such as {what}=[{example!r}], not {given!r:.60}")
    texts = list(given)
    for text in texts:
        if not isinstance(text, str):
            raise InvalidInput(f"{what} must be a list of texts, such as {what}=[{example!r}]; {text!r:.60} is none")
    return set(texts)


def _may_be_deep(data: bytes) -> bool:
    """Whether it may be nested deeper than anybody looks."""
    return data[:1] != b'"' and data.count(b"{") + data.count(b"[") > DEPTH_MAX


def _words(name: str) -> list[str]:
    """`accessToken`, `access-token` and `ACCESS_TOKEN` are all `access` and `token`."""
    return [word.lower() for word in _WORD.findall(name)]
