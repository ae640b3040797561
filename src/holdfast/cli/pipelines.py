"""Pipelines: begin one, see where it stands, cancel it."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.run import check_reachable, see_to_a_manager
from holdfast.cli.session import Session
from holdfast.layers.pipeline_states import PipelineSpec

app = topic()
commands = topic()
app.add(commands, "pipeline")

Id = Annotated[str, Argument(metavar="ID", help="The pipeline.", show_default=False)]


@group(commands)
async def pipeline(session: Session) -> None:
    """List pipelines of tasks, run one, see where it stands.

    \b
    Example:
      holdfast pipeline run pipeline.json --input '{"day": "2026-01-31"}'
      holdfast pipeline status nightly-31
    """
    await _list(session)


@command(commands)
async def run(
    session: Session,
    file: Annotated[str, Argument(metavar="FILE", help="Its stages, as JSON.", show_default=False)],
    input: Annotated[str | None, Option(metavar="JSON", help="The message of the first stage.")] = None,
    id: Annotated[
        str | None, Option(metavar="ID", help="Its name: the same one again finds it, and begins nothing twice.")
    ] = None,
    detach: Annotated[bool, Option("--detach", "-d", help="Print its id and end; it goes on.")] = False,
) -> None:
    """Run a pipeline, and print the result of its last stage as JSON.

    FILE has {"name", "stages": [{"name", "spec", "after", "each", "retries"}]}. The exit code is 25 when it fails. Ctrl-C ends the waiting and not the
    pipeline: run it again under the same --id to wait again.

    \b
    Example:
      holdfast pipeline run pipeline.json --id nightly-31
      holdfast pipeline run pipeline.json --detach
    """
    spec = PipelineSpec.of(values.json_file(file))
    message = None if input is None else values.parsed(input)
    async with session.store(create=True) as store:
        space = await session.view(store)
        await check_reachable(store, space)
        handle = await space.tasks.pipelines.start(spec, message, id=id)
        await see_to_a_manager(store, space, session.json)
        if detach:
            output.value({"id": handle.id} if session.json else handle.id, session.json)
            return
        if id is None:
            output.note(f"pipeline {handle.id}", session.json)
        result = await handle.result()
        output.json_line({**output.plain(await handle.state()), "result": result} if session.json else result)


@command(commands, name="list")
async def list_(session: Session) -> None:
    """List pipelines, those that ended and are kept included.

    \b
    Example:
      holdfast pipeline list
    """
    await _list(session)


async def _list(session: Session) -> None:
    async with session.space() as space:
        found = await space.tasks.pipelines.list()
    if session.json:
        output.json_line([output.plain(state) for state in found])
        return
    rows = [
        [state.id, state.spec.name, state.status, output.moment(state.created_at) or "", state.reason or ""]
        for state in found
    ]
    output.table(("id", "name", "status", "since", "reason"), rows)


@command(commands)
async def status(session: Session, id: Id) -> None:
    """Show where a pipeline stands: each stage, and how many of its tasks have completed.

    \b
    Example:
      holdfast pipeline status nightly-31
    """
    async with session.space() as space:
        state = await (await space.tasks.pipelines.get(id)).state()
    if session.json:
        output.json_line(output.plain(state))
        return
    output.line(f"{output.shown(state.id)}: {state.status}" + (f" ({state.reason})" if state.reason else ""))
    rows = []
    for stage in state.spec.stages:
        stands = state.stages[stage.name]
        done = sum(part.status == "completed" for part in stands.parts)
        rows.append([stage.name, stands.status, "" if stands.items is None else f"{done}/{stands.items}"])
    output.table(("stage", "status", "tasks"), rows)


@command(commands)
async def cancel(session: Session, id: Id) -> None:
    """Submit nothing more of a pipeline, and stop what runs.

    \b
    Example:
      holdfast pipeline cancel nightly-31
    """
    async with session.space() as space:
        state = await (await space.tasks.pipelines.get(id)).cancel()
    output.value(output.plain(state) if session.json else state.status, session.json)
