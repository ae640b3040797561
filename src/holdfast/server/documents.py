"""YAML that people write, read as typed values; every mistake is told with its place.

`parse` makes a tree of nodes from bytes; `Reading` turns nodes into msgspec structs, by their fields and types, and
collects what is wrong on the way, so that one look at the message mends the whole file:

    keeper.yaml:14:16: policies.rate_limits[0].burst: expected a whole number of at least 1, got "many"

The files are small and their language is kept small: one document, no aliases (a few lines of them can stand for
gigabytes), no tags, no merge keys. Nothing is executed and nothing is taken from the environment.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec
import yaml

from holdfast.errors import InvalidInput

BYTES_MAX: Final = 1024 * 1024
DEPTH_MAX: Final = 32
NODES_MAX: Final = 20_000
"""Keys, values, lists and mappings of a file: about a second of reading."""
PROBLEMS_MAX: Final = 20
"""Mistakes told in one message."""
SHOWN_MAX: Final = 60

_STANDARD: Final = "tag:yaml.org,2002:"
_MAP, _SEQ, _NULL = f"{_STANDARD}map", f"{_STANDARD}seq", f"{_STANDARD}null"

Leaf = Callable[[Any], Any]
"""Reads a plain value. Raises Expected with what it wants, or InvalidInput with a sentence of its own."""


class Problem(msgspec.Struct, frozen=True):
    """One mistake. Lines and columns count from 1; `path` is empty when it is the file as a whole."""

    line: int
    column: int
    path: str
    message: str


class InvalidDocument(InvalidInput):
    """The file says something it may not. `problems` has each mistake, the message all of them, a line each."""

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.line, problem.column)))
        told = [
            f"{name}:{each.line}:{each.column}: {each.path + ': ' if each.path else ''}{each.message}"
            for each in self.problems[:PROBLEMS_MAX]
        ]
        if len(self.problems) > PROBLEMS_MAX:
            told.append(f"{name}: and {len(self.problems) - PROBLEMS_MAX} more")
        super().__init__("\n".join(told))


class Expected(Exception):
    """A value of another kind was expected: which one, and perhaps what was meant."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


class Missing:
    """Stands for a value that could not be read."""


MISSING: Final = Missing()


# --- from bytes to nodes ---


class _Loader(yaml.SafeLoader):
    """YAML without aliases, of bounded depth and size."""

    _depth = 0
    _nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, "aliases are not used here; write the value out", event.start_mark)
        if self._depth >= DEPTH_MAX:
            raise yaml.MarkedYAMLError(None, None, f"nested deeper than {DEPTH_MAX} levels", event.start_mark)
        if self._nodes >= NODES_MAX:
            raise yaml.MarkedYAMLError(None, None, f"more than {NODES_MAX:,} keys and values", event.start_mark)
        self._nodes += 1
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def parse(name: str, data: bytes) -> yaml.MappingNode:
    """The mapping a file holds; InvalidDocument if it holds none."""

    def refused(line: int, column: int, message: str) -> InvalidDocument:
        return InvalidDocument(name, [Problem(line, column, "", message)])

    if len(data) > BYTES_MAX:
        raise refused(1, 1, f"the file has {len(data):,} bytes; at most {BYTES_MAX:,} are read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line, column = _place(data[: exc.start].decode("utf-8", "replace"))
        raise refused(line, column, f"not UTF-8 text (byte 0x{data[exc.start]:02x}); save the file as UTF-8") from None
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as exc:
        raise refused(*_place(text[: exc.position]), _no_character(exc)) from None
    try:
        node: yaml.Node | None = loader.get_single_node()
    except yaml.reader.ReaderError as exc:
        raise refused(*_place(text[: exc.position]), _no_character(exc)) from None
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark or loader.get_mark()
        raise refused(mark.line + 1, mark.column + 1, _told(exc, text, mark.line)) from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as exc:  # such as an escape of no character
        mark = loader.get_mark()
        raise refused(mark.line + 1, mark.column + 1, f"not YAML: {str(exc)[:SHOWN_MAX]}") from None
    finally:
        loader.dispose()
    if node is None:
        raise refused(1, 1, "the file is empty; a file without settings of its own is {}")
    if not isinstance(node, yaml.MappingNode):
        raise refused(*_start(node), f"expected keys and values such as 'store: team.db', got {got(node)}")
    return node


def _place(before: str) -> tuple[int, int]:
    lines = before.split("\n")
    return len(lines), len(lines[-1]) + 1


def _start(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _no_character(exc: yaml.reader.ReaderError) -> str:
    return f"the character #x{ord(exc.character) if isinstance(exc.character, str) else exc.character:04x} is not allowed in YAML"


def _told(exc: yaml.MarkedYAMLError, text: str, line: int) -> str:
    lines = text.split("\n")
    shown = lines[line] if line < len(lines) else ""
    if "\t" in shown[: len(shown) - len(shown.lstrip())] or "'\\t'" in str(exc.problem):
        return "the line is indented with a tab; YAML is indented with spaces"
    return ", ".join(part for part in (exc.context, exc.problem) if part) or "not YAML"


# --- from nodes to values ---


class Reading:
    """Reads one file's nodes as structs. `leaves` says how the fields are read whose type does not say it all."""

    def __init__(self, name: str, leaves: Mapping[tuple[type, str], Leaf]) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self._leaves = leaves
        self._nodes: dict[str, yaml.Node] = {}

    def struct(self, node: yaml.Node, kind: type[msgspec.Struct], path: str = "") -> Any:
        """A mapping as a struct; MISSING if it cannot be made."""
        if is_null(node):
            return kind() if not _required(kind) else self.wrong(node, path, f"expected {_fields(kind)}, got nothing")
        if not isinstance(node, yaml.MappingNode) or node.tag != _MAP:
            return self.wrong(node, path, f"expected keys and values, got {got(node)}")
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        values, whole = {}, True
        for key, key_node, value_node in self._items(node, path):
            where = _join(path, key)
            self._nodes[where] = value_node
            field = fields.get(key)
            if field is None:
                self.wrong(key_node, where, f"there is no such key{_meant(key, fields)}")
                continue
            value = self._value(value_node, field.type, where, self._leaves.get((kind, field.name)))
            whole = whole and value is not MISSING
            values[field.name] = value
        for field in fields.values():
            if field.required and field.name not in values:
                whole = False
                self.wrong(node, path, f"{field.encode_name} is missing")
        try:
            return kind(**values) if whole else MISSING
        except InvalidInput as exc:  # a struct may have a word of its own about its values
            return self.wrong(node, path, str(exc))

    def wrong(self, node: yaml.Node, path: str, message: str) -> Missing:
        """Note a mistake."""
        self.problems.append(Problem(*_start(node), path, message))
        return MISSING

    def wrong_at(self, path: str, message: str) -> None:
        """Note a mistake at a value that was read, or at the nearest thing around it that was written."""
        near = path
        while near and near not in self._nodes:
            near = near.rpartition(".")[0]
        node = self._nodes.get(near)
        if node is None:
            self.problems.append(Problem(1, 1, path, message))
        else:
            self.wrong(node, path, message)

    def finish(self) -> None:
        """Tell of all mistakes, if there were any."""
        if self.problems:
            raise InvalidDocument(self.name, self.problems)

    def _items(self, node: yaml.MappingNode, path: str) -> Iterable[tuple[str, yaml.Node, yaml.Node]]:
        """Keys as they are written, each once."""
        seen: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.wrong(key_node, path, f"a key is a word, not {got(key_node)}")
            elif key_node.value in seen:
                line, _ = _start(seen[key_node.value])
                self.wrong(key_node, _join(path, key_node.value), f"is given twice; the first is on line {line}")
            else:
                seen[key_node.value] = key_node
                yield key_node.value, key_node, value_node

    def _value(self, node: yaml.Node, kind: Any, path: str, leaf: Leaf | None) -> Any:
        options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        if type(None) in options:
            if is_null(node):
                return None
            [kind] = [option for option in options if option is not type(None)]
        if get_origin(kind) is tuple:
            return self._tuple(node, get_args(kind)[0], path, leaf)
        if get_origin(kind) is dict:
            return self._dict(node, get_args(kind)[1], path, leaf)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and leaf is None:
            return self.struct(node, kind, path)
        return self._leaf(node, kind, path, leaf)

    def _tuple(self, node: yaml.Node, kind: Any, path: str, leaf: Leaf | None) -> Any:
        if not isinstance(node, yaml.SequenceNode) or node.tag != _SEQ:
            return self.wrong(node, path, f"expected a list, got {got(node)}")
        items = []
        for number, each in enumerate(node.value):
            self._nodes[f"{path}[{number}]"] = each
            items.append(self._value(each, kind, f"{path}[{number}]", leaf))
        return MISSING if MISSING in items else tuple(items)

    def _dict(self, node: yaml.Node, kind: Any, path: str, check_key: Leaf | None) -> Any:
        """A mapping with names of the user's own, which the field's leaf checks."""
        if is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode) or node.tag != _MAP:
            return self.wrong(node, path, f"expected keys and values, got {got(node)}")
        values = {}
        for key, key_node, value_node in self._items(node, path):
            where = _join(path, key)
            self._nodes[where] = value_node
            try:
                if check_key is not None:
                    check_key(key)
                values[key] = self._value(value_node, kind, where, None)
            except InvalidInput as exc:
                values[key] = self.wrong(key_node, where, str(exc))
        return MISSING if MISSING in values.values() else values

    def _leaf(self, node: yaml.Node, kind: Any, path: str, leaf: Leaf | None) -> Any:
        try:
            return (leaf or _typed(kind))(_plain(node))
        except Expected as exc:
            return self.wrong(node, path, f"expected {exc}, got {got(node)}{exc.hint}")
        except InvalidInput as exc:
            return self.wrong(node, path, str(exc))


def is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _NULL


def _plain(node: yaml.Node) -> Any:
    """A scalar as YAML understands it: text, number, true or false, nothing."""
    if not isinstance(node, yaml.ScalarNode):
        return node  # no leaf expects one, so it will say what it does expect
    loader = _Loader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError, OverflowError, KeyError, TypeError):
        return node
    finally:
        loader.dispose()


def _typed(kind: Any) -> Leaf:
    """How a value of a plain type is read: as msgspec reads it, and text must be fit to be shown."""

    def read(value: Any) -> Any:
        try:
            found = msgspec.convert(value, kind)
        except msgspec.ValidationError:
            if get_origin(kind) is Literal and isinstance(value, str):
                raise Expected(_one_of(kind), _meant(value, get_args(kind), known=False)) from None
            raise Expected(_one_of(kind) if get_origin(kind) is Literal else _KINDS[kind]) from None
        if kind is str and (not found or not found.isprintable()):
            raise Expected("text without control characters")
        return found

    return read


_KINDS: Final = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


def got(node: yaml.Node) -> str:
    """What stands there, as messages tell it."""
    if not node.tag.startswith(_STANDARD) or ":python/" in node.tag:
        return f"something with the tag {quoted(node.tag)}; tags are not used here"
    if isinstance(node, yaml.MappingNode):
        return "keys and values"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if is_null(node):
        return "nothing"
    text = str(node.value)
    if isinstance(_plain(node), str) or not text.isprintable():
        return quoted(text)
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


def quoted(text: str) -> str:
    cut = text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"
    return json.dumps(cut, ensure_ascii=not cut.isprintable())


def _join(path: str, key: str) -> str:
    word = key if key and key.isprintable() and len(key) <= SHOWN_MAX else quoted(key)
    return f"{path}.{word}" if path else word


def _one_of(kind: Any) -> str:
    return " or ".join(quoted(choice) for choice in get_args(kind))


def _meant(word: str, known_words: Iterable[str], *, known: bool = True) -> str:
    words = list(known_words)
    close = difflib.get_close_matches(word[:SHOWN_MAX], words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(sorted(words))}" if known else ""


def _required(kind: type[msgspec.Struct]) -> bool:
    return any(field.required for field in msgspec.structs.fields(kind))


def _fields(kind: type[msgspec.Struct]) -> str:
    return " and ".join(field.encode_name for field in msgspec.structs.fields(kind) if field.required)
