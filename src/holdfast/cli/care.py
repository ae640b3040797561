"""The health of a store: doctor, tidy."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli import output
from holdfast.cli.command import Argument, Ended, Option, command, topic
from holdfast.cli.session import Session, check_admin, opened

app = topic()


@command(app)
async def doctor(
    session: Session,
    url: Annotated[
        str | None, Argument(metavar="URL", help="Another store than --store names.", show_default=False)
    ] = None,
    full: Annotated[
        bool, Option("--full", help="Look at all of the audit, and read every blob that is referenced.")
    ] = False,
    blobs: Annotated[
        str | None, Option(metavar="FOLDER", help="Where the blobs are. Default: beside the store's file.")
    ] = None,
) -> None:
    """Tell what this store guarantees, and what is wrong.

    That is: how durable its spaces are and what that means here, what is wrong with its file or server, whether the chains of the audit are sound and the blobs that are referenced are there. Of the audit and the blobs it looks at so much that it does not take long, and says how much; --full looks at all. Each finding comes with advice where there is something to do. The exit code is 1 when a finding is an error.

    \b
    Example:
      holdfast doctor
      holdfast doctor /backups/monday.db --full --json
    """
    where = url or session.url
    async with opened(where, json=session.json, token=session.token_for(where), blobs=blobs) as store:
        check_admin(store, "doctor")
        findings = await store.doctor(full=full)
    if session.json:
        output.json_line(output.plain(findings))
    else:
        columns = ("level", "subject", "message", "advice")
        output.table(columns, [[getattr(finding, column) for column in columns] for finding in findings])
    output.flush()
    if any(finding.level == "error" for finding in findings):
        raise Ended(1)


@command(app)
async def tidy(session: Session) -> None:
    """Do the background work now.

    That is: sweep what has expired, collect what lists left, seal the audit, forget the old feed. A program that has the store open does this by itself; a store that only the command line uses needs it now and then.

    \b
    Example:
      holdfast tidy
    """
    async with session.store() as store:
        check_admin(store, "tidy")
        await store.tidy()
        tidied = [info.name for info in await store.spaces()]
    output.value({"tidied": tidied} if session.json else f"{len(tidied)} space(s) tidied", session.json)
