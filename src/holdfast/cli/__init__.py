"""The command line: `holdfast get`, `set`, `watch`, `audit`, `export`, `doctor` and the rest.

One file per topic holds the commands; `app.py` loads only the topic that is asked for, so that a command starts quickly.
`command.py` is how commands are declared, each with the same five options. `calling.py` reads a plain call; all others, and
help, are typer's (`guidance.py`). `session.py` finds and opens the store, `output.py` is everything that is printed, `values.py`
everything that is read from a person.

This module is the boundary: whatever happens becomes an exit code, and one sentence on stderr when it is an error. 0 is
success, 2 a wrong call, 74 an output that could not be written, 130 Ctrl-C, 141 a reader that went away; every error of the library has its own (`errors.py`).
With --json the sentence is {"error": code, "message": sentence}. A traceback is never shown, unless HOLDFAST_DEBUG is set.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code. Without `argv` it is the process's own, and the process ends with it."""
    if argv is not None:
        return _main(list(argv))
    gc.disable()  # what is imported stays; to look for garbage in it takes a tenth of a small command
    code = _main(sys.argv[1:])
    if not os.environ.get("HOLDFAST_DEBUG"):
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End the process. The store is closed and everything is printed; to let the interpreter take itself apart as well
    takes as long as a small command does."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _main(args: list[str]) -> int:
    try:
        from holdfast.cli import output

        output.prepare()
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except output.PipeClosed:
        output.silence()
        return PIPE_CLOSED
    except Exception as exc:
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
        return output.tell_error(exc, as_json)


def _run(args: list[str]) -> int:
    from holdfast.cli.calling import read
    from holdfast.cli.command import Ended

    try:
        call = read(args)
        if call is None:
            return _guided(args)
        call.run()
    except Ended as end:
        return end.code
    return 0


def _guided(args: list[str]) -> int:
    """The same with typer, which tells what a call can be and what is wrong with one."""
    import typer

    from holdfast.cli.guidance import root

    try:
        code = root().main(args=args, prog_name="holdfast", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0
