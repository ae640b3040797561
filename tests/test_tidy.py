"""How the code base is kept, as tests.

Each rule is a function from a source file to its findings (`path:line: what is wrong`), so that it can be shown a
fault: `test_every_rule_sees_the_fault_it_is_for` does that, and a rule that can not fail is none. Exceptions are
tables with a reason per line; an exception nobody needs any more is a finding too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PACKAGE = SRC / "holdfast"
THIS = Path(__file__).resolve()

LINES_MAX = 600

READS_TIME = {
    "src/holdfast/clock.py": "the clock itself",
    "src/holdfast/testing/servers/process.py": "a server that does not start is given up",
    "src/holdfast/ids.py": "request ids sort by the time they were made, whatever clock a store was given",
}

PUBLIC_MODULES = {
    "holdfast": "what users import",
    "holdfast.blocking": "what users without an event loop import",
    "holdfast.processes": "what a task manager imports",
    "holdfast.testing": "what authors of engines import",
    "holdfast.middleware.policy": "what a server imports that guards an engine",
}


class Source(NamedTuple):
    """A text file of the project, named by its path from the root."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.text, self.path)

    def at(self, line: int, what: str) -> str:
        return f"{self.path}:{line}: {what}"


@functools.cache
def _parsed(text: str, path: str) -> ast.Module:
    return ast.parse(text, path)


Rule = Callable[[Source], Iterator[str]]


def read(path: Path) -> Source:
    return Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def python_files(*folders: str) -> list[Source]:
    return [read(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def text_files() -> list[Source]:
    """Everything people read: sources, scripts and documents, without this file, which must name what it forbids."""
    files = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"} or path.name == "Makefile"]
    for folder in ("src", "tests", "benchmarks", "examples", "docs", "scripts", ".ci"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    sources = []
    for path in sorted(files):
        if path != THIS:
            try:
                sources.append(read(path))
            except UnicodeDecodeError:
                continue
    return sources


def report(findings: Iterable[str]) -> None:
    found = list(findings)
    assert not found, "\n" + "\n".join(found)


# --- rules about one file ---


def has_a_docstring(source: Source) -> Iterator[str]:
    if not source.text.startswith('"""') and ast.get_docstring(source.tree) is None:
        yield source.at(1, "the module has no docstring; say what it keeps, how it works and how it fails")


CLOCKS = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "localtime", "gmtime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def does_not_read_time(source: Source) -> Iterator[str]:
    """By any name: `time.time`, `from time import time`, `import time as t`, `datetime.datetime.now`."""
    tree = source.tree
    meant = {"time": "time", "datetime": "datetime", "date": "date"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name in CLOCKS}
        elif isinstance(node, ast.ImportFrom) and node.module == "datetime":
            meant |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            for alias in node.names:
                if alias.name in CLOCKS["time"]:
                    yield source.at(node.lineno, f"imports time.{alias.name}; take the time from a Clock")
        elif isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if node.attr in CLOCKS.get(meant.get(name, ""), ()):
                yield source.at(node.lineno, f"reads {ast.unparse(node)}; take the time from a Clock")


FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def executes_no_data(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in FORBIDDEN_IMPORTS:
                    yield source.at(node.lineno, f"imports {name}, which executes what it reads")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS:
                yield source.at(node.lineno, f"calls {called}")
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield source.at(node.lineno, "starts a shell; pass a list of arguments")


def is_short(source: Source) -> Iterator[str]:
    if (lines := source.text.count("\n")) > LINES_MAX:
        yield source.at(LINES_MAX + 1, f"the file has {lines} lines; the limit is {LINES_MAX}: it is two modules")


def does_not_print(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "pprint"}:
            yield source.at(node.lineno, "prints; a library raises, returns, or logs")


UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")


def is_finished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if match := UNFINISHED.search(line):
            yield source.at(number, f"says {match[0]}; do it, or open an issue")


FAULTS: list[tuple[Rule, str, int]] = [
    (has_a_docstring, "import os\n", 1),
    (does_not_read_time, "import time\n\nx = time.time()\n", 3),
    (does_not_read_time, "import time as t\nx = t.monotonic\n", 2),
    (does_not_read_time, "from time import time_ns\n", 1),
    (does_not_read_time, "from datetime import datetime\nx = datetime.now()\n", 2),
    (does_not_read_time, "import datetime\nx = datetime.datetime.utcnow()\n", 2),
    (does_not_read_time, "import datetime as d\nx = d.date.today()\n", 2),
    (does_not_read_time, "from datetime import datetime as dt\nx = dt.now()\n", 2),
    (executes_no_data, "import pickle\n", 1),
    (executes_no_data, "from marshal import loads\n", 1),
    (executes_no_data, "x = 1\neval('x')\n", 2),
    (executes_no_data, "exec('x')\n", 1),
    (executes_no_data, "import os\nos.system('ls')\n", 2),
    (executes_no_data, "import subprocess\nsubprocess.run('ls', shell=True)\n", 2),
    (is_short, "x = 1\n" * (LINES_MAX + 1), LINES_MAX + 1),
    (does_not_print, "def f():\n    print('x')\n", 2),
    (is_finished, "x = 1\n# FIXME later\n", 2),
]


@pytest.mark.parametrize(("rule", "text", "line"), FAULTS)
def test_every_rule_sees_the_fault_it_is_for(rule: Rule, text: str, line: int) -> None:
    findings = list(rule(Source("faulty.py", text)))
    assert len(findings) == 1
    assert findings[0].startswith(f"faulty.py:{line}: ")


def test_every_rule_about_one_file_is_shown_a_fault() -> None:
    rules = {
        item
        for item in globals().values()
        if inspect.isfunction(item) and item.__annotations__ == {"source": "Source", "return": "Iterator[str]"}
    }
    assert rules == {rule for rule, _, _ in FAULTS}


def test_every_module_has_a_docstring() -> None:
    report(finding for source in python_files("src", "benchmarks", "examples") for finding in has_a_docstring(source))


def test_time_is_read_in_the_clock_alone() -> None:
    findings = []
    for source in python_files("src"):
        found = list(does_not_read_time(source))
        if source.path not in READS_TIME:
            findings += found
        elif not found:
            findings.append(f"{source.path}:1: reads no time any more; remove it from READS_TIME")
    findings += [f"{path}:1: is in READS_TIME and does not exist" for path in READS_TIME if not (ROOT / path).is_file()]
    report(findings)


def test_nothing_executes_data() -> None:
    report(finding for source in python_files("src", "benchmarks", "examples") for finding in executes_no_data(source))


def test_no_source_file_is_too_long() -> None:
    report(finding for source in python_files("src") for finding in is_short(source))


def test_only_the_command_line_prints() -> None:
    library = [source for source in python_files("src") if not source.path.startswith("src/holdfast/cli/")]
    report(finding for source in library for finding in does_not_print(source))


def test_nothing_is_left_for_later() -> None:
    report(finding for source in text_files() for finding in is_finished(source))


# --- what users see ---


def undocumented(module: object, names: Iterable[str], prose: str) -> Iterator[str]:
    """Classes, functions and modules carry their own docstring; constants and aliases are explained in the documents."""
    for name in names:
        if not hasattr(module, name):
            yield f"{name} is in __all__ and does not exist"
            continue
        item = getattr(module, name)
        if inspect.isclass(item) or inspect.isroutine(item) or inspect.ismodule(item):
            if not (vars(item).get("__doc__") if inspect.isclass(item) else item.__doc__):
                yield f"{name} has no docstring"
        elif not re.search(rf"\b{re.escape(name)}\b", prose):
            yield f"{name} is explained neither in the README nor in docs/"


def public_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name: the order ruff keeps as well."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def prose() -> str:
    return "\n".join(source.text for source in text_files() if source.path.endswith(".md"))


def test_the_public_names_are_sorted_exist_and_are_documented() -> None:
    import holdfast

    names = list(holdfast.__all__)
    assert names == sorted(names, key=public_order), "src/holdfast/__init__.py: __all__ is not sorted"
    assert len(names) == len(set(names)), "src/holdfast/__init__.py: __all__ has doubles"
    report(f"src/holdfast/__init__.py: {fault}" for fault in undocumented(holdfast, names, prose()))


def test_a_public_name_that_is_missing_or_undocumented_is_seen() -> None:
    class Fake:
        class Bare:
            pass

        LIMIT = 3

    assert len(list(undocumented(Fake, ["Bare", "LIMIT", "gone"], "no such words"))) == 3
    assert len(list(undocumented(Fake, ["LIMIT"], "the LIMIT is three"))) == 0


def error_table() -> dict[str, tuple[str, int, int]]:
    """Class → code, HTTP status, exit code, as errors.py has them."""
    errors = importlib.import_module("holdfast.errors")
    return {
        name: (item.code, item.http_status, item.exit_code)
        for name, item in vars(errors).items()
        if inspect.isclass(item) and issubclass(item, Exception) and item.__module__ == errors.__name__
    }


def documented_errors(source: Source) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Line, class and the next three cells of each row | `Class` | `code` | HTTP | exit | … |."""
    for number, line in enumerate(source.text.splitlines(), 1):
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if line.lstrip().startswith("| `") and len(cells) >= 4:
            yield number, cells[0], tuple(cells[1:4])


def differences(source: Source, table: dict[str, tuple[str, int, int]]) -> Iterator[str]:
    seen: set[str] = set()
    for line, name, cells in documented_errors(source):
        if name not in table:
            yield source.at(line, f"{name} is no class of errors.py")
        elif name in seen:
            yield source.at(line, f"{name} is listed twice")
        # A status may be followed by the exception to it, in words: "409 (ETag: 412)".
        elif tuple(cell.split()[0] if cell else "" for cell in cells) != tuple(map(str, table[name])):
            yield source.at(line, f"{name} has {', '.join(cells)}; errors.py has {', '.join(map(str, table[name]))}")
        seen.add(name)
    for name, (code, http, exit_code) in table.items():
        if name not in seen:
            yield source.at(1, f"misses the row | `{name}` | `{code}` | {http} | {exit_code} | … |")


def test_the_table_of_errors_is_the_one_in_the_code() -> None:
    table = error_table()
    path = ROOT / "docs" / "errors.md"
    report(differences(read(path) if path.is_file() else Source("docs/errors.md", ""), table))
    for position, what in ((0, "code"), (2, "exit code")):
        values = [row[position] for row in table.values()]
        assert len(values) == len(set(values)), f"src/holdfast/errors.py: two classes share one {what}"


def test_a_wrong_table_of_errors_is_seen() -> None:
    table = {"Conflict": ("conflict", 409, 3), "NotFound": ("not_found", 404, 4)}
    good = "| class | code | HTTP | exit |\n|---|---|---|---|\n| `Conflict` | `conflict` | 409 (ETag: 412) | 3 |\n"
    missing = list(differences(Source("e.md", good), table))
    assert missing == ["e.md:1: misses the row | `NotFound` | `not_found` | 404 | 4 | … |"]
    right = good + "| `NotFound` | `not_found` | 404 | 4 |\n"
    assert list(differences(Source("e.md", right), table)) == []
    wrong = list(differences(Source("e.md", right.replace("| 4 |", "| 5 |")), table))
    assert wrong == ["e.md:4: NotFound has not_found, 404, 5; errors.py has not_found, 404, 4"]
    invented = list(differences(Source("e.md", right + "| `Gone` | `gone` | 410 | 9 |\n"), table))
    assert invented == ["e.md:5: Gone is no class of errors.py"]


def test_the_tree_drawn_in_the_errors_names_every_class() -> None:
    errors = importlib.import_module("holdfast.errors")
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or "")) | {"Error"}
    report(
        f"src/holdfast/errors.py:1: the tree and the classes differ in {name}" for name in drawn ^ set(error_table())
    )


# --- nothing lies about unused ---


def module_name(path: str) -> str:
    parts = path.removeprefix("src/").removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_modules(source: Source) -> set[str]:
    """What a file imports, or names in a string as lazy loading does ("holdfast.engines.sqlite:SQLiteEngine")."""
    here = module_name(source.path).split(".") if source.path.startswith("src/") else []
    if here and not source.path.endswith("__init__.py"):
        here = here[:-1]
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^holdfast(?:\.\w+)+(?=:|$)", node.value))
    return names


def dead_modules(sources: list[Source], outside: set[str], kept: dict[str, str]) -> Iterator[str]:
    """Modules nobody reaches. What only tests use is dead, unless it is the suite that is shipped for them."""
    uses = {source.path: named_modules(source) for source in sources}
    users = Counter(name for names in uses.values() for name in names)
    packages = set(users) | outside
    for source in sources:
        name = module_name(source.path)
        if name in kept or name in outside or source.path.endswith("__main__.py"):
            continue
        if source.path.endswith("__init__.py"):
            if not any(used == name or used.startswith(name + ".") for used in packages):
                yield source.at(1, f"nobody imports anything of {name}")
        elif users[name] == (name in uses[source.path]):  # nobody, or it alone
            yield source.at(1, f"nobody imports {name}: remove it, or use it")


def entry_points() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tables = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    return {target.partition(":")[0] for table in tables for target in table.values()}


def test_no_module_is_dead() -> None:
    shipped = {
        name
        for source in python_files("tests", "benchmarks", "examples")
        if "testing" in source.text  # reading the others takes seconds
        for name in named_modules(source)
        if name.startswith("holdfast.testing")
    }
    findings = list(dead_modules(python_files("src"), entry_points() | shipped, PUBLIC_MODULES))
    for name in entry_points():
        path = SRC / name.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__init__.py").is_file():
            findings.append(f"pyproject.toml: the entry point {name} does not exist")
    report(findings)


def test_a_dead_module_is_seen() -> None:
    sources = [
        Source("src/holdfast/__init__.py", "from holdfast.store import open\nfrom . import space\n"),
        Source("src/holdfast/store.py", "ENGINES = {'sqlite': 'holdfast.engines.sqlite:SQLiteEngine'}\n"),
        Source("src/holdfast/space.py", ""),
        Source("src/holdfast/engines/__init__.py", ""),
        Source("src/holdfast/engines/sqlite.py", "from .feed import follow\n"),
        Source("src/holdfast/engines/feed.py", ""),
        Source("src/holdfast/forgotten.py", "import holdfast.forgotten\n"),
        Source("src/holdfast/attic/__init__.py", ""),
    ]
    assert list(dead_modules(sources, set(), PUBLIC_MODULES)) == [
        "src/holdfast/forgotten.py:1: nobody imports holdfast.forgotten: remove it, or use it",
        "src/holdfast/attic/__init__.py:1: nobody imports anything of holdfast.attic",
    ]


def unused_files(files: Iterable[str], readers: list[Source]) -> Iterator[str]:
    """Files no reader names, by file name ("demo.py") or as a module of their folder ("benchmarks.reads", "import reads")."""
    for path in files:
        stem, folder = Path(path).stem, Path(path).parent.name
        named = re.compile(
            rf"\b{stem}\.py\b|\b{folder}[./]{stem}\b|from (?:\.|{folder}) import [^\n]*\b{stem}\b|[\"']{stem}[\"']"
        )
        if not any(named.search(reader.text) for reader in readers if reader.path != path):
            yield f"{path}:1: nobody runs it: name it where the others of its folder are run"


def runners(*globs: str) -> list[Source]:
    return [read(path) for pattern in globs for path in sorted(ROOT.glob(pattern)) if path.is_file() and path != THIS]


def test_every_example_is_run_by_a_test_and_mentioned() -> None:
    examples = [source.path for source in python_files("examples")]
    run = list(unused_files(examples, runners("tests/**/*.py")))
    told = list(unused_files(examples, runners("Makefile", "README.md", "docs/**/*.md")))
    report(run + [finding.replace("nobody runs it", "no document mentions it") for finding in told])


def test_every_benchmark_is_run() -> None:
    parts = {"__init__", "__main__"}
    benchmarks = [source.path for source in python_files("benchmarks") if Path(source.path).stem not in parts]
    report(unused_files(benchmarks, runners("benchmarks/**/*.py")))


def test_an_example_nobody_runs_is_seen() -> None:
    readers = [Source("tests/test_examples.py", 'run("examples/demo.py")\nfrom benchmarks import writes, reads\n')]
    files = ["examples/demo.py", "benchmarks/reads.py", "examples/forgotten.py"]
    assert [finding.partition(":")[0] for finding in unused_files(files, readers)] == ["examples/forgotten.py"]


def test_every_command_of_the_makefile_explains_itself() -> None:
    text = (ROOT / "Makefile").read_text()
    inner = {"setup", "tools", "ready", "lint", "types", "imports"}
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:")).split()[1:]
    explained = set(re.findall(r"^([a-z]+):.*## \S", text, re.MULTILINE))
    report(f"Makefile: {name} has no line for make help" for name in set(phony) - inner - explained)
    report(f"Makefile: {name} is missing" for name in {"demo", "test", "check", "bench", "soak", "help"} - explained)
