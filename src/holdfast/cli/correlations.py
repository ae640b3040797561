"""Correlations: make one, signal, see who is missing, decide."""

from __future__ import annotations

from typing import Annotated, Any, Final

from holdfast.cli import output
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.cli.values import given, whole_number
from holdfast.errors import AccessDenied, InvalidInput
from holdfast.layers.correlation_entries import FINISHED, Decision
from holdfast.layers.correlations import CorrelationView

app = topic()
commands = topic()
app.add(commands, "correlation")

LISTED: Final = 100
"""How many are listed, unless told."""

Id = Annotated[str, Argument(metavar="ID", help="The correlation.", show_default=False)]


@group(commands)
async def correlation(session: Session) -> None:
    """List correlations, or make, signal and decide one.

    \b
    Example:
      holdfast correlation list --status collecting
      holdfast correlation show c-123
    """
    await _list(session, None, "", LISTED)


@command(commands, name="list")
async def list_(
    session: Session,
    status: Annotated[
        str | None, Option(metavar="STATUS", help="Only collecting, ready, orchestrating, completed or failed ones.")
    ] = None,
    prefix: Annotated[str, Option(metavar="TEXT", help="Only ids that begin with this.")] = "",
    number: Annotated[str, Option("-n", metavar="NUMBER", help="How many at most.")] = str(LISTED),
) -> None:
    """List correlations, those that ended and are kept included.

    \b
    Example:
      holdfast correlation list --status collecting
    """
    await _list(session, status, prefix, whole_number(number))


async def _list(session: Session, status: str | None, prefix: str, limit: int) -> None:
    async with session.space() as space:
        found = await space.correlations.list(status=status, prefix=prefix, limit=limit)  # type: ignore[arg-type]
    if session.json:
        output.json_line(
            [{"id": state.corr_id, "status": state.status, **output.plain(state.metadata)} for state in found]
        )
        return
    rows = [
        [
            state.corr_id,
            state.status,
            ", ".join(state.metadata.expected_agents) or str(state.metadata.needed),
            output.moment(state.metadata.created_at) or "",
            output.moment(state.metadata.timeout_at) or "",
        ]
        for state in found
    ]
    output.table(("id", "status", "expected", "created", "timeout"), rows)


@command(commands)
async def create(
    session: Session,
    id: Id,
    expect: Annotated[
        list[str] | None,
        Option(
            metavar="AGENT|NUMBER",
            help="An agent it waits for; repeat it for more. A number alone: so many, whoever they are.",
        ),
    ] = None,
    patience: Annotated[str | None, Option("--timeout", metavar="TIME", help="How long it waits. Default: 5m.")] = None,
    min_agents: Annotated[
        str | None, Option(metavar="NUMBER", help="So many are enough when the time is over.")
    ] = None,
    profile: Annotated[
        str | None, Option(metavar="NAME", help="simple, workflow or high_frequency: how many, and how long.")
    ] = None,
    pattern: Annotated[
        str, Option(metavar="NAME", help="fan_in, fan_out, conditional or sequential: what is told of it.")
    ] = "fan_in",
) -> None:
    """Make a correlation, or find the one that was made with the same expectations.

    \b
    Example:
      holdfast correlation create c-123 --expect momentum --expect risk --timeout 5m
    """
    if not expect and profile is None:
        raise InvalidInput("name whom it expects, with --expect or --profile")
    least = None if min_agents is None else whole_number(min_agents)
    async with session.space(create=True) as space:
        correlation = await space.correlation(
            id, expect=_expected(expect), timeout=patience, min_agents=least, profile=profile, pattern=pattern
        )
        _show(await correlation.view(), None, session.json)


def _expected(words: list[str] | None) -> list[str] | int | None:
    """Whom it waits for: agents by name, or how many."""
    if words is not None and len(words) == 1 and words[0].isdecimal():
        return whole_number(words[0])
    return words or None


@command(commands)
async def show(
    session: Session,
    id: Id,
    wait: Annotated[
        str | None, Option(metavar="TIME", help="Wait so long for the decision, if there is none yet.")
    ] = None,
) -> None:
    """Show a correlation: its status, signals, who is missing, what came late, and the decision if you may see it.

    \b
    Example:
      holdfast correlation show c-123 --wait 5m
    """
    async with session.space() as space:
        correlation = await space.correlation(id)
        decision, hidden = None, False
        try:
            decision = await correlation.decision(wait=wait or 0)
            view = await correlation.view()
            if decision is None and view.status in FINISHED:  # in between
                decision = await correlation.decision()
        except AccessDenied:  # agents see signals and the context, not what is made of them
            hidden, view = True, await correlation.view()
        _show(view, decision, session.json)
    if hidden:
        output.note("what was decided is for orchestrators; an agent sees signals and the context", session.json)


@command(commands)
async def signal(
    session: Session,
    id: Id,
    value: Annotated[
        str | None,
        Argument(metavar="JSON", help="The signal's analysis; - or nothing reads stdin.", show_default=False),
    ] = None,
    version: Annotated[str | None, Option("--agent-version", metavar="TEXT", help="The agent's version.")] = None,
    replace: Annotated[bool, Option("--replace", help="Revise what this agent has sent before.")] = False,
    behalf: Annotated[
        str | None, Option("--for", metavar="AGENT", help="Whose signal it is; for orchestrators and administrators.")
    ] = None,
) -> None:
    """Send the signal of an agent (--agent, or --for another), and print what became of it: accepted, duplicate or late.

    \b
    Example:
      holdfast correlation signal c-123 '{"risk_level": "medium", "overall_score": 0.65}' --agent risk
    """
    analysis = given(value)
    if not isinstance(analysis, dict):
        raise InvalidInput("a signal's analysis is a JSON object")
    fields: dict[str, Any] = {"analysis": analysis}
    if version is not None:
        fields["agent_version"] = version
    async with session.space() as space:
        signalled = await (await space.correlation(id)).signal(fields, agent=behalf, replace=replace)
    told = {"outcome": signalled.outcome, "version": signalled.version}
    output.value(told if session.json else signalled.outcome, session.json)


@command(commands)
async def decide(
    session: Session,
    id: Id,
    merge: Annotated[
        str,
        Option(metavar="NAME", help="momentum_risk_fusion, weighted_average, majority, priority, first or all."),
    ] = "all",
    publish: Annotated[
        bool,
        Option(
            "--publish",
            help="Leave it to an orchestrator to publish it. Default: if one has ever run in the space that publishes.",
        ),
    ] = False,
    silent: Annotated[bool, Option("--no-publish", help="Nobody is to publish it.")] = False,
) -> None:
    """Decide a correlation now, with the signals that are there.

    \b
    Example:
      holdfast correlation decide c-123 --merge momentum_risk_fusion
    """
    if publish and silent:
        raise InvalidInput("--publish and --no-publish contradict each other; give one of them")
    told = True if publish else False if silent else None
    async with session.space() as space:
        decision = await space.orchestrator(merge=merge, publish=told).decide(id)
    if session.json:
        output.json_line(output.plain(decision))
    else:
        output.line(_sentence(decision))
        if decision.to_publish:
            output.line("it is in the outbox, for an orchestrator that publishes")


def _show(view: CorrelationView, decision: Decision | None, json: bool) -> None:
    if json:
        told = {
            "id": view.corr_id,
            "status": view.status,
            "signals": view.signals,
            "missing": list(view.missing),
            "missing_count": view.missing_count,
            "late": view.late,
            "metadata": output.plain(view.metadata),
            "version": view.version,
            "expires_at": output.moment(view.expires_at),
            "decision": None if decision is None else output.plain(decision),
        }
        output.json_line(told)
        return
    output.line(f"{view.corr_id}: {_standing(view)}")
    rows = [["signal", agent, output.brief(signal.get("analysis"))] for agent, signal in view.signals.items()]
    rows += [["missing", agent, ""] for agent in view.missing]
    if view.missing_count and not view.missing:
        rows.append(["missing", f"any {view.missing_count}", ""])
    rows += [["late", agent, output.brief(signal.get("analysis"))] for agent, signal in view.late.items()]
    output.table(("", "agent", "analysis"), rows)
    if decision is not None:
        output.line(_sentence(decision))


def _standing(view: CorrelationView) -> str:
    """How it stands, and until when that counts."""
    metadata = view.metadata
    if view.status in FINISHED:
        kept = "" if view.expires_at is None else f", kept until {output.moment(view.expires_at)}"
        return f"{view.status} at {output.moment(metadata.last_updated)}{kept}"
    there = f"{len(view.signals)} of {metadata.needed} signals"
    return f"{view.status}, {there}, until {output.moment(metadata.timeout_at)}"


def _sentence(decision: Decision) -> str:
    words = [decision.action, decision.direction or "", f"{decision.size:g}" if decision.size else ""]
    told = " ".join(word for word in words if word)
    reason = decision.details.get("reason")
    return f"decided: {told}" + (f" ({reason})" if reason else f", confidence {decision.confidence:g}")
