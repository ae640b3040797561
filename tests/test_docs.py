"""What the documents show is what happens.

The ```python blocks of a page run one after the other in one namespace, in an empty folder; `await` may stand at the top
level. An ```output block is what the python block before it printed. In a ```console block the lines after `$ ` are run
and the others are their output; what the blocks before it have begun goes on meanwhile. A ```yaml block is written to
keeper.yaml. In output, … stands for anything within a line, or alone on a line for any lines.

`docs/reference/cli.md` is made from the command line's own help: `python -m tests.test_docs` writes it anew.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLI_REFERENCE = ROOT / "docs" / "reference" / "cli.md"
GUIDE_LINES_MAX = 90
DECISION_LINES_MAX = 30
COMMAND_S_MAX = 60


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line its text begins on."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> Iterator[Block]:
    language, lines, start = "", [], 0
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```") and not inside:
            inside, language, lines, start = True, line[3:].strip(), [], number + 1
        elif line.startswith("```"):
            inside = False
            yield Block(language, "\n".join(lines) + "\n", start)
        elif inside:
            lines.append(line)
    if inside:
        raise AssertionError(f"the block that begins on line {start - 1} does not end")


def matches(shown: str, actual: str) -> bool:
    """Whether an output is the one that is shown."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in actual.splitlines())) is not None


def check_output(where: str, shown: str, actual: str) -> None:
    assert matches(shown, actual), f"{where}: shows\n{shown}\nand what happens is\n{actual}"


class Page:
    """One page being run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""

    def run(self, text: str) -> None:
        with asyncio.Runner() as runner:
            for block in blocks(text):
                where = f"{self.name}:{block.line}"
                if block.language == "python":
                    self._python(block, runner)
                elif block.language == "output":
                    check_output(where, block.text, self._printed)
                elif block.language == "console":
                    self._console(where, block.text, runner)
                elif block.language == "yaml":
                    Path("keeper.yaml").write_text(block.text)

    def _python(self, block: Block, runner: asyncio.Runner) -> None:
        source = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's own lines
        code = compile(source, self.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if code.co_flags & inspect.CO_COROUTINE:

                async def run() -> None:
                    await eval(code, self._namespace)

                runner.run(run())
            else:
                exec(code, self._namespace)
        self._printed = printed.getvalue()

    def _console(self, where: str, text: str, runner: asyncio.Runner) -> None:
        commands = re.split(r"^\$ ", text, flags=re.MULTILINE)
        assert not commands[0], f"{where}: begins with output"
        for command in commands[1:]:
            line, _, shown = command.partition("\n")
            assert line.startswith("holdfast "), f"{where}: {line} is not run by the tests"
            environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
            environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
            running = asyncio.to_thread(  # a worker of the page lives on: it keeps its leases, however long this takes
                subprocess.run,
                line,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S_MAX,
            )
            check_output(f"{where}: {line}", shown, runner.run(running).stdout)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_the_page_does_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Page(name_of(page)).run(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert False\n```\n",
        "```python\nawait nothing()\n```\n",
        "```python\nprint('a')\n```\n```output\nb\n```\n",
        "```console\n$ holdfast get nothing\nsomething\n```\n",
        "```console\n$ rm -r something\n```\n",
        "```python\nx = 1\n",
    ],
    ids=["fails", "awaits", "prints", "answers", "foreign", "open"],
)
def test_a_page_that_shows_something_else_is_seen(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, NameError)):
        Page("page.md").run(text)


def test_what_a_page_has_begun_goes_on_while_a_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Page("page.md").run(
        "```python\nimport holdfast\n@holdfast.workflow\nasync def double(ctx, n):\n    return 2 * n\n"
        "store = await holdfast.open('team.db')\n"
        "worker = await store.space('default').workflows.worker([double]).__aenter__()\n```\n"
        "```console\n$ holdfast --store team.db workflow start double 21 --wait 30s\n…\n42\n```\n"
        "```python\nawait worker.stop()\nawait store.close()\n```\n"
    )


def test_dots_stand_for_what_differs() -> None:
    assert matches("a … c\n…\nz\n", "a b c\nd\ne\nz\n")
    assert matches("…\nz\n", "z\n")
    assert not matches("a … c\n", "a b c d\n")
    assert not matches("a\n", "a\nb\n")


# --- what pages point to ---


def broken_links(name: str, text: str, folder: Path) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("http://", "https://", "#")) and not (folder / target.partition("#")[0]).exists():
            yield f"{name}: {target} does not exist"


def test_every_link_leads_somewhere() -> None:
    found = [fault for page in pages() for fault in broken_links(name_of(page), page.read_text(), page.parent)]
    assert not found, "\n".join(found)
    assert list(broken_links("x.md", "see [this](nowhere.md)", ROOT)) == ["x.md: nowhere.md does not exist"]


def defined_tests() -> set[str]:
    """The names of all test functions, those of the shipped suite included, and of their classes and files."""
    names: set[str] = set()
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src" / "holdfast" / "testing").rglob("*.py")]:
        names |= set(re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)) | {path.stem}
    return names


def test_every_test_that_is_cited_exists() -> None:
    known = defined_tests()
    cited = {(name_of(page), name) for page in pages() for name in re.findall(r"\btest_\w+", page.read_text())}
    missing = sorted(f"{page}: there is no {name}" for page, name in cited if name not in known)
    assert not missing, "\n".join(missing)
    assert cited, "nothing is cited: the search is broken"


def test_pages_stay_short() -> None:
    limits = {"docs/guides": GUIDE_LINES_MAX, "docs/decisions": DECISION_LINES_MAX}
    long = [
        f"{name_of(page)}: {count} lines; the limit is {limit}"
        for folder, limit in limits.items()
        for page in sorted((ROOT / folder).glob("*.md"))
        if (count := page.read_text().count("\n")) > limit
    ]
    assert not long, "\n".join(long)


def test_the_first_guide_says_how_code_that_awaits_is_run() -> None:
    prose = (ROOT / "docs" / "guides" / "getting-started.md").read_text().partition("```python")[0]
    assert "asyncio.run(main())" in prose
    assert "python -m asyncio" in prose


def test_decisions_are_numbered_without_gaps_and_have_their_parts() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    parts = ["Status", "Context", "Decision", "Consequences"]
    assert [
        page.name for page in decisions if re.findall(r"^\*\*(\w+)\.\*\*", page.read_text(), re.MULTILINE) != parts
    ] == []


def test_the_limits_that_are_told_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "keyspace.md").read_text()
    rows = re.findall(r"^\| ([\d,]+)(?: bytes| ms)? \| .* \| `([\w.]+)\.([A-Z_]+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 14
    told = {f"{module}.{name}": int(number.replace(",", "")) for number, module, name in rows}
    assert told == {
        f"{module}.{name}": getattr(importlib.import_module(f"holdfast.{module}"), name) for _, module, name in rows
    }


# --- the command line's page ---

COMMON = ("store", "space", "agent", "json", "token")


def cli_reference() -> str:
    """The page about the command line, from its own help."""
    from holdfast.cli.guidance import root

    top = root()
    lines = [
        "# The command line",
        "",
        "Made from `holdfast --help`; a test compares. Every command takes these, before or after its name:",
        "",
        *_options([param for param in top.params if param.name in COMMON]),
        "",
        "An option wins over its environment variable. The default store is `.holdfast/store.db` in the nearest folder,",
        "from here upwards, that has a `.holdfast` or a `.git`; the first write makes it. A command that only reads makes",
        'nothing. Errors are one sentence on stderr, or `{"error", "message"}` with `--json`; exit codes are in',
        '[errors](../errors.md). A value is JSON where it is JSON, and else text; what begins with `{`, `[` or `"` and is no',
        "JSON is refused: `--text`, or JSON text (`'\"[draft]\"'`), says that text is meant. Piped tables are lines",
        "with tabs. Times are ISO 8601 in UTC to the millisecond, `2026-01-31T08:00:00.000Z`, also in JSON; values, and messages",
        "that are shown as they are stored, keep what is in them. `HOLDFAST_DEBUG=1` shows where an error comes from.",
    ]
    for name in top.list_commands(None):
        lines += _command(f"holdfast {name}", top.get_command(None, name))
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> list[str]:
    from holdfast.cli.guidance import word

    words = "".join(f" {word(param)}" for param in command.params if param.param_type_name == "argument")
    text, _, example = inspect.cleandoc(command.help or "").partition("\b\nExample:\n")
    lines = ["", f"## {name}{words}", "", *(line.rstrip() for line in text.strip().splitlines())]
    arguments = [
        f"- `{param.metavar}`: {param.help}" for param in command.params if param.param_type_name == "argument"
    ]
    lines += ["", *arguments] if arguments else []
    own = [
        param for param in command.params if param.param_type_name == "option" and param.name not in (*COMMON, "help")
    ]
    lines += ["", *_options(own)] if own else []
    if example:
        lines += ["", "```sh", *(line.strip() for line in example.strip().splitlines()), "```"]
    for sub, each in sorted(getattr(command, "commands", {}).items()):
        lines += _command(f"{name} {sub}", each)
    return lines


def _options(params: list[Any]) -> list[str]:
    rows = [
        f"| `{', '.join(param.opts)}{' ' + param.metavar if param.metavar else ''}` | {param.help} |"
        for param in params
    ]
    return ["| option | |", "|---|---|", *rows]


def test_the_page_about_the_command_line_is_its_help() -> None:
    assert CLI_REFERENCE.read_text() == cli_reference(), "write it anew: python -m tests.test_docs"


if __name__ == "__main__":
    CLI_REFERENCE.write_text(cli_reference())
