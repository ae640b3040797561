"""The keeper from the command line: serve."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli import output
from holdfast.cli.command import command, topic
from holdfast.cli.session import Session
from holdfast.errors import InvalidInput, Unavailable

app = topic()


@command(app, quick=True)
async def serve(
    session: Session,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="The keeper's settings, in YAML.", show_default=False)
    ] = None,
) -> None:
    """Serve a store to agents over the network.

    Without --config: the store of this project under .holdfast/, or the one --store names, on 127.0.0.1 only, with the rules that ship with Holdfast. The first start prints an administrator's token, once; make others with holdfast token create.

    Ctrl-C or SIGTERM stops it: what was taken is finished first. SIGHUP reads the settings anew, as does a change of the file.

    \b
    Example:
      holdfast serve
      holdfast serve --config keeper.yaml
      holdfast --store holdfast://127.0.0.1:7420 token create worker-7 --space contoso --role agent
    """
    try:
        from holdfast.server.config import ConfigFile, defaults
        from holdfast.server.keeper import Keeper
        from holdfast.server.logs import configure
        from holdfast.middleware.verbs import check_verb
    except ModuleNotFoundError as exc:
        raise InvalidInput(f"serving needs {exc.name}: pip install 'holdfast[server]'") from exc

    file: Any = None
    keeper: Keeper | None = None

    def changed(settings: Any) -> None:
        configure(settings.log)
        if keeper is not None:
            keeper.reload(settings)

    if config is None:
        settings = msgspec.structs.replace(defaults(), store=session.to_serve())
    else:
        if session.given_store is not None:
            raise InvalidInput("--store and --config both name a store; keep one of them")
        file = ConfigFile(Path(config), changed, check_verb=check_verb)
        settings = file.config
    configure(settings.log)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop.set)
    keeper = Keeper(settings)
    began = loop.time()
    await keeper.start()
    try:
        if file is not None:
            file.start()
            loop.add_signal_handler(signal.SIGHUP, file.reload)
        else:
            loop.add_signal_handler(signal.SIGHUP, lambda: None)
        _tell(session, keeper, loop.time() - began)
        failed = asyncio.ensure_future(keeper.failed.wait())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([failed, stopped], return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        stopped.cancel()
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)  # a second one ends it at once
        if file is not None:
            await file.close()
        await keeper.stop()
    if keeper.failure is not None:
        raise Unavailable(f"the keeper had to stop: {keeper.failure}. Start it again: it finds out what is on the disk")


def _tell(session: Session, keeper: Any, seconds: float) -> None:
    """What is served where; and the token, once."""
    listen, scheme = keeper.config.listen, "s" if keeper.config.tls is not None else ""
    where = {"store": keeper.config.store}
    if listen.binary is not None:
        where["binary"] = f"holdfast{scheme}://{listen.binary.host}:{keeper.binary_port}"
    if listen.http is not None:
        where["http"] = f"http{scheme}://{listen.http.host}:{keeper.http_port}"
    if listen.unix is not None:
        where["unix"] = f"holdfast+unix://{listen.unix}"
    token = None if keeper.admin_token is None else str(keeper.admin_token)
    if session.json:
        output.json_line({**where, "seconds": round(seconds, 3)} | ({} if token is None else {"admin_token": token}))
    else:
        output.line(f"Holdfast keeps watch, ready in {seconds:.2f} s. Ctrl-C stops it.")
        for name, text in where.items():
            output.line(f"  {name:<8}{text}")
        if token is not None:
            output.line("  The administrator's token, shown only now; keep it safe:")
            output.line(f"          {token}")
            output.line("  Then:   export HOLDFAST_TOKEN=…   and   holdfast --store " + where.get("binary", "URL") + " spaces")
    output.flush()
