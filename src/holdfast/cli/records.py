"""Records: get, entry, set, delete, increment, keys."""

from __future__ import annotations

from typing import Annotated, Any

from holdfast.checking import check_batch
from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, topic
from holdfast.cli.session import Session
from holdfast.engine import OPERATIONS_MAX, Batch, Operation
from holdfast.errors import InvalidInput, NotFound
from holdfast.layers import batch
from holdfast.layers.records import Record, Records

app = topic()

Key = Annotated[str, Argument(metavar="KEY", help="The record's name.", show_default=False)]
Ttl = Annotated[str | None, Option(metavar="DURATION", help="How long it lives: 90s, 5m, 1h, 7d, 250ms.")]
RequestId = Annotated[
    str | None,
    Option(
        metavar="ID", help="Names this request: repeated with it within an hour, it is done once and prints the same."
    ),
]
AsText = Annotated[bool, Option("--text", help="Take values as text, also when they are JSON.")]


@command(app)
async def get(
    session: Session,
    key: Key,
    default: Annotated[str | None, Option(metavar="VALUE", help="What to print when there is no such record.")] = None,
) -> None:
    """Print a value.

    Text is printed as it is, anything else as JSON. Without the record, and without --default, the exit code is 4.

    \b
    Example:
      holdfast get regime
      holdfast get limits | jq .orders
      holdfast get retries --default 3
    """
    missing: Any = object()
    otherwise = None if default is None else values.parsed(default)
    try:
        async with session.space() as space:
            value = await space.records.get(key, missing)
            if value is missing:
                raise NotFound(f"there is no record {key!r} in space {space.name!r}")
    except NotFound:
        if default is None:
            raise
        value = otherwise
    output.value(value, session.json)


@command(app)
async def entry(session: Session, key: Key) -> None:
    """Print a record with everything known about it.

    That is its version, owner, times, expiry, type and state; the items of a list or set are not shown. A value of an older version of its type's schema is shown as it is stored.

    \b
    Example:
      holdfast entry regime
      holdfast entry regime --json | jq .version
    """
    async with session.space() as space:
        record = await _entry(space.records, key)
        if record is None:
            raise NotFound(f"there is no record {key!r} in space {space.name!r}")
    told = {"value": record.value, **_described(record)}
    if session.json:
        output.json_line(told)
        return
    for name, value in told.items():
        if value is not None or name == "value":
            shown = output.shown(value) if isinstance(value, str) and name != "value" else output.as_json(value)
            output.line(f"{name:<10}  {shown}")


@command(app, name="set", dashes=True)
async def set_(
    session: Session,
    key: Key,
    value: Annotated[
        str | None, Argument(metavar="VALUE", help="The value; '-' reads it from stdin.", show_default=False)
    ] = None,
    text: AsText = False,
    ttl: Ttl = None,
    type: Annotated[
        str | None, Option(metavar="NAME", help="What it is; gives it that type's retention and schema.")
    ] = None,
    state: Annotated[str | None, Option(metavar="NAME", help="The state it is in, for retention.")] = None,
    if_absent: Annotated[bool, Option("--if-absent", help="Only if there is no such record.")] = False,
    if_version: Annotated[str | None, Option(metavar="N", help="Only if it is at this version.")] = None,
    if_value: Annotated[str | None, Option(metavar="VALUE", help="Only if it holds exactly this.")] = None,
    request_id: RequestId = None,
) -> None:
    """Write a value and print its version.

    A value that is JSON is stored as that (42, true, null, {"a": 1}, "42"), everything else as text. What begins with {,
    [ or " and is no JSON, and NaN and Infinity, which JSON does not have, are refused, unless --text says that it is text. A condition that does not hold changes nothing,
    and the exit code is 3.

    \b
    Example:
      holdfast set regime risk-on --ttl 1h
      echo '{"orders": 10}' | holdfast set limits -
      holdfast set leader market --if-absent
      holdfast set leader risk --if-value market
    """
    if if_absent + (if_version is not None) + (if_value is not None) > 1:
        raise InvalidInput("give one of --if-absent, --if-version and --if-value")
    expected = None if if_value is None else values.parsed(if_value, as_text=text)
    new = values.given(value, as_text=text)
    options: dict[str, Any] = {"ttl": ttl, "type": type, "state": state}
    _check(session, batch.set_(key, new, **options))
    options["request_id"] = request_id
    async with session.space(create=True) as space:
        if if_absent:
            version = await space.records.compare_and_swap(key, new, expect=batch.ABSENT, **options)
        elif if_value is not None:
            version = await space.records.compare_and_swap(key, new, expect=expected, **options)
        elif if_version is not None:
            version = await space.records.compare_and_swap(
                key, new, expect_version=values.whole_number(if_version), **options
            )
        else:
            version = await space.records.set(key, new, **options)
    output.value({"key": key, "version": version} if session.json else version, session.json)


@command(app)
async def delete(
    session: Session,
    keys: Annotated[
        list[str], Argument(metavar="KEY", help="The names of records, lists or sets.", show_default=False)
    ],
    request_id: RequestId = None,
) -> None:
    """Remove records, lists or sets.

    Prints how many there were. What is not there is no error. Up to 128 keys are removed together, all or nothing.

    \b
    Example:
      holdfast delete regime limits
    """
    found: list[bool] = []
    async with session.space() as space:
        deletions = [batch.delete_(key) for key in keys]
        for start in range(0, len(deletions), OPERATIONS_MAX):
            part = deletions[start : start + OPERATIONS_MAX]
            receipt = await space.commit(*part, request_id=values.part_of(request_id, start // OPERATIONS_MAX))
            found += [bool(result) for result in receipt.results]
    removed = [key for key, was_there in zip(keys, found, strict=True) if was_there]
    absent = [key for key, was_there in zip(keys, found, strict=True) if not was_there]
    output.value({"deleted": removed, "absent": absent} if session.json else len(removed), session.json)


@command(app, dashes=True)
async def increment(
    session: Session,
    key: Key,
    delta: Annotated[str, Argument(metavar="DELTA", help="A whole number, also a negative one.")] = "1",
    ttl: Ttl = None,
    request_id: RequestId = None,
) -> None:
    """Add to a number and print the sum.

    A record that does not exist counts as 0.

    \b
    Example:
      holdfast increment orders
      holdfast increment stock -3
      holdfast increment orders --request-id order-4711   # however often it is tried, it counts once
    """
    number = values.whole_number(delta)
    _check(session, batch.increment(key, number, ttl=ttl))
    async with session.space(create=True) as space:
        total = await space.records.increment(key, number, ttl=ttl, request_id=request_id)
    output.value({"key": key, "value": total} if session.json else total, session.json)


@command(app)
async def keys(
    session: Session,
    prefix: Annotated[
        str, Argument(metavar="PREFIX", help="Only names that begin like this.", show_default=False)
    ] = "",
) -> None:
    """Print the names of records, lists and sets, in order.

    A name with a line end, or with other characters that do not print, is shown quoted, as JSON. With --json each line
    also tells version, owner and times.

    \b
    Example:
      holdfast keys orders/
      holdfast keys --json | jq -r 'select(.owner == "market") | .key'
    """
    async with session.space() as space:
        async for record in space.records.scan(prefix):
            if session.json:
                output.json_line(_described(record))
            else:
                output.line(output.shown(record.key))


def _check(session: Session, operation: Operation) -> None:
    """Refuse what no engine takes before a store is made for it."""
    check_batch(Batch(session.agent, (operation,)))


async def _entry(records: Records, key: str) -> Record | None:
    try:
        return await records.entry(key, as_stored=True)
    except InvalidInput:  # a list or a set is described without its items; a key that is wrong is wrong again
        async for record in records.scan(key, page=1):
            return record if record.key == key else None
        return None


def _described(record: Record) -> dict[str, Any]:
    return {
        "key": record.key,
        "version": record.version,
        "owner": record.owner,
        "created_at": output.moment(record.created_at),
        "updated_at": output.moment(record.updated_at),
        "expires_at": output.moment(record.expires_at),
        "type": record.type,
        "state": record.state,
        "schema_version": record.schema_version,
    }
