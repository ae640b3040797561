"""Schemas: what types there are, whether data is as they want it, and migrating what is older."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.errors import InvalidInput, MigrationFailed, SchemaViolation
from holdfast.layers.migration import MigrationReport
from holdfast.layers.schemas import RegisteredSchema, Schemas

app = topic()
commands = topic()
app.add(commands, "schema")

Type = Annotated[str, Argument(metavar="TYPE", help="The type's name.", show_default=False)]
Version = Annotated[str | None, Option(metavar="VERSION", help="Such as 1.1.0. Default: the newest.")]
Prefix = Annotated[str, Option(metavar="TEXT", help="Only records whose name begins with this.")]


@group(commands)
async def schema(session: Session) -> None:
    """List schemas, check data, migrate what is older.

    \b
    Example:
      holdfast schema list
      holdfast schema validate order '{"amount": 3}'
      holdfast schema migrate order --dry-run --module desk.orders
    """
    await list_(session)


@command(commands, name="list")
async def list_(
    session: Session,
    type: Annotated[str | None, Argument(metavar="TYPE", help="Only this type.", show_default=False)] = None,
) -> None:
    """List the registered versions of every type.

    A line has the type, version, who registered it, and when. With --json there is the schema too.

    \b
    Example:
      holdfast schema list
      holdfast schema list order --json
    """
    async with session.space() as space:
        found = await space.schemas.list(type)
    if session.json:
        output.json_line([_told(each) for each in found])
        return
    columns = ("type", "version", "registered_by", "registered_at")
    output.table(columns, [[str(_told(each)[column]) for column in columns] for each in found])


@command(commands)
async def show(session: Session, type: Type, version: Version = None) -> None:
    """Print a schema.

    \b
    Example:
      holdfast schema show order
      holdfast schema show order --version 1.0.0 | jq .required
    """
    async with session.space() as space:
        found = await space.schemas.get(type, version)
    output.json_line(_told(found) if session.json else found.schema)


@command(commands)
async def register(
    session: Session,
    type: Type,
    version: Annotated[str | None, Argument(metavar="VERSION", help="Such as 1.1.0.", show_default=False)] = None,
    document: Annotated[
        str | None,
        Argument(metavar="SCHEMA", help="The JSON Schema; '-' reads it from stdin.", show_default=False),
    ] = None,
) -> None:
    """Register a version of a type, for the whole space.

    From now on what is written with this type must be so. The same again changes nothing; another schema under a version that is there is refused, and the exit code
    is 3. Without a version it is one that comes with Holdfast: correlation_state, workflow_state or audit_state.

    \b
    Example:
      holdfast schema register order 1.0.0 < order.json
      holdfast schema register correlation_state
    """
    given = None if version is None else values.given(document)
    async with session.space(create=True) as space:
        if version is None:
            await space.schemas.register_shipped(type)
        else:
            await space.schemas.register(type, version, given)
        found = await space.schemas.get(type, version)
    output.value({"type": type, "version": found.version} if session.json else found.version, session.json)


@command(commands)
async def validate(
    session: Session,
    type: Type,
    value: Annotated[
        str | None, Argument(metavar="VALUE", help="The value; '-' reads it from stdin.", show_default=False)
    ] = None,
    version: Version = None,
    records: Annotated[bool, Option("--records", help="Check every stored record of this type.")] = False,
    prefix: Prefix = "",
) -> None:
    """Check a value, or what is stored, against a schema.

    Prints nothing when all is well; otherwise what is wrong and where, and the exit code is 22. Records are checked against the version under which they were written.

    \b
    Example:
      holdfast schema validate order '{"amount": 3}'
      holdfast schema validate order --version 1.0.0 < order.json
      holdfast schema validate order --records
    """
    if records and (value is not None or version is not None):
        raise InvalidInput("give one of --records and a value; records know their version")
    given = None if records else values.given(value)
    async with session.space() as space:
        if not records:
            await space.schemas.validate(type, given, version)
            return
        report = await space.schemas.check(type, prefix=prefix)
    if session.json:
        output.json_line(dataclasses.asdict(report))
    if report.failed:
        _tell_failures(session, report)
        raise SchemaViolation(f"{report.failed:,} of {sum(report.found.values()):,} records are not as they should be")


@command(commands)
async def migrate(
    session: Session,
    type: Type,
    dry_run: Annotated[bool, Option("--dry-run", help="Tell what would happen; change nothing.")] = False,
    module: Annotated[
        str | None,
        Option(
            metavar="MODULE",
            help="Where your steps are: its function register(schemas), or MODULE:FUNCTION, is called.",
        ),
    ] = None,
    prefix: Prefix = "",
    unversioned: Annotated[
        str | None,
        Option(metavar="VERSION", help="Take records from before there was a schema as this version."),
    ] = None,
) -> None:
    """Rewrite all records of an older version.

    Each keeps its owner, state and lifetime, and is rewritten only if nobody changes it meanwhile. What cannot be migrated is told and stays as it is; the exit code is 23
    then. Interrupted, simply run it again. In a dry run also what the module registers is only tried.

    \b
    Example:
      holdfast schema migrate order --dry-run --module desk.orders
      holdfast schema migrate order --module desk.orders
    """
    steps = None if module is None else _function(module)
    async with session.space() as space:
        schemas = space.schemas.rehearsal() if dry_run else space.schemas
        if steps is not None:
            ended = steps(schemas)
            if inspect.isawaitable(ended):
                await ended
        with _progress(session.json) as progress:
            report = await schemas.migrate(
                type, dry_run=dry_run, prefix=prefix, unversioned=unversioned, progress=progress
            )
    if session.json:
        output.json_line(dataclasses.asdict(report))
    else:
        output.table(("version", "records"), [(version, str(count)) for version, count in sorted(report.found.items())])
        output.line(f"{report.migrated:,} {'would be ' if dry_run else ''}migrated to {report.newest}")
    if report.failed:
        _tell_failures(session, report)
        raise MigrationFailed(f"{report.failed:,} records could not be migrated and stay as they are")


def _function(module: str) -> Callable[[Schemas], Any]:
    """What a module registers, from the folder one is in or from what is installed."""
    name, _, function = module.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(name), function or "register")
    except (ImportError, AttributeError, ValueError) as exc:
        raise InvalidInput(f"{module} cannot be used: {exc}; it needs a function register(schemas)") from exc
    if not callable(found):
        raise InvalidInput(f"{module} is no function")
    call: Callable[[Schemas], Any] = found
    return call


@contextmanager
def _progress(json: bool) -> Iterator[Callable[[MigrationReport], None] | None]:
    """A line on the terminal, where there is one."""
    if json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("migrating") as status:
        yield lambda report: status.update(f"{report.migrated:,} of {sum(report.found.values()):,} records so far")


def _tell_failures(session: Session, report: MigrationReport) -> None:
    if not session.json:
        rows = [(failure.key, failure.version, failure.message) for failure in report.failures]
        output.table(("record", "version", "why"), rows)


def _told(each: RegisteredSchema) -> dict[str, Any]:
    return {
        "type": each.type,
        "version": each.version,
        "registered_by": each.registered_by,
        "registered_at": output.moment(each.registered_at),
        "schema": each.schema,
    }
