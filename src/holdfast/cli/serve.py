"""The keeper from the command line: serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from holdfast.cli import output
from holdfast.cli.command import Option, command, topic
from holdfast.cli.session import Session
from holdfast.engines.registry import shown_url
from holdfast.errors import InvalidInput

if TYPE_CHECKING:
    from holdfast.server.keeper import Keeper

app = topic()


@command(app, quick=True)
async def serve(
    session: Session,
    config: Annotated[
        str | None, Option("--config", metavar="FILE", help="The keeper's settings, in YAML.", show_default=False)
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
        from holdfast.server.config import defaults
        from holdfast.server.service import Service
    except ModuleNotFoundError as exc:
        raise InvalidInput(f"serving needs {exc.name}: pip install 'holdfast[server]'") from exc

    if config is not None and session.given_store is not None:
        raise InvalidInput("--store and --config both name a store; keep one of them")
    if config is None:
        service = Service(msgspec.structs.replace(defaults(), store=session.to_serve()))
    else:
        service = Service(Path(config))
    await service.run(lambda keeper, seconds: _tell(session, keeper, seconds))


def _tell(session: Session, keeper: Keeper, seconds: float) -> None:
    """What is served where; and the token, once."""
    listen, scheme = keeper.config.listen, "s" if keeper.config.tls is not None else ""
    where = {"store": shown_url(keeper.store.url)}
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
            output.line(
                "  Then:   export HOLDFAST_TOKEN=…   and   holdfast --store " + where.get("binary", "URL") + " spaces"
            )
    output.flush()
