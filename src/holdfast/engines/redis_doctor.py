"""What a Redis store guarantees as its servers are configured, and what to change: durability, and `holdfast doctor`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from redis.exceptions import RedisError, ResponseError

from holdfast.engine import Durability, Finding
from holdfast.engines.redis_link import Facts, Link, shown_address
from holdfast.engines.redis_servers import Servers
from holdfast.engines.redis_url import Address
from holdfast.errors import DurabilityUnavailable

FREE_SHARE_MIN: Final = 0.1
_ALWAYS: Final = "CONFIG SET appendonly yes; CONFIG SET appendfsync always; CONFIG REWRITE"


def check_durability(facts: Facts, durability: Durability) -> None:
    """Refuse what this server cannot give."""
    if durability not in facts.durabilities:
        raise refusal(facts, durability)


def refusal(facts: Facts, durability: str) -> DurabilityUnavailable:
    """Why a durability cannot be had here, and the ways out."""
    if facts.evicts:
        return DurabilityUnavailable(
            f"this Redis server makes room by removing keys (maxmemory-policy {facts.policy}), so nothing in it is durable. "
            "Set maxmemory-policy to noeviction, or make the space with durability='volatile'"
        )
    if facts.fsync is None:
        found = "CONFIG is forbidden, so whether every write is fsynced cannot be seen"
        way = "If it runs with appendonly yes and appendfsync always, say so with ?durable=asserted in the URL"
    else:
        skips = " and no-appendfsync-on-rewrite yes" if facts.skips_fsync else ""
        found = f"it runs with appendonly {'yes' if facts.aof else 'no'}, appendfsync {facts.fsync}{skips}"
        way = "Set appendonly to yes, appendfsync to always" + (
            " and no-appendfsync-on-rewrite to no" if facts.skips_fsync else ""
        )
    return DurabilityUnavailable(
        f"this Redis server cannot give durability {durability!r}: {found}. {way}; "
        "or open the store (or make the space) with durability='async', whose last second a crash may lose"
    )


@contextlib.contextmanager
def explaining(facts: Facts) -> Iterator[None]:
    """A script that refuses for the space's durability is explained by what the server is."""
    try:
        yield
    except ResponseError as exc:
        code, _, durability = str(exc).partition(" ")
        if code != "HFDURABILITY":
            raise
        raise refusal(facts, durability) from exc


# --- findings ---


async def examine(servers: Servers) -> list[Finding]:
    """Ask every server that keeps spaces; changes nothing."""
    kind = servers.url.kind
    topology = {
        "single": Finding("ok", "topology", "one server, named by the URL; there is no failover"),
        "sentinel": Finding(
            "ok", "topology", f"the primary {servers.url.master!r} of {len(servers.url.addresses)} sentinels"
        ),
        "cluster": Finding("ok", "topology", "a cluster; each space is on one of its primaries"),
    }[kind]
    findings = [topology]

    async def work(link: Link, asking: bool) -> tuple[Facts, dict[str, str]]:
        return await link.ask_facts(), await _settings(link)

    async def primaries(link: Link, asking: bool) -> list[Address]:
        return await servers.finder.primaries()

    for address in await servers.run(f"{servers.url.prefix}:spaces", "reads", primaries):
        facts, settings = await servers.run("", "reads", work, at=address)
        replicated = facts.replicas > 0 or servers.finder.has_replicas(address)
        where = shown_address(address)
        findings.append(Finding("ok", f"server {where}", f"Redis {facts.version}, {facts.role}"))
        findings += [
            *_durability(facts, settings), *_memory(facts), *_replicas(servers, facts, settings, replicated=replicated)
        ]  # fmt: skip
    return findings


async def _settings(link: Link) -> dict[str, str]:
    """What CONFIG tells, as far as we may ask."""
    answers = await link.call_all(*(("CONFIG", "GET", name) for name in ("save", "min-replicas-to-write")))
    pairs: list[Any] = [part for answer in answers if not isinstance(answer, RedisError) for part in answer]
    return {name.decode(): value.decode() for name, value in zip(pairs[::2], pairs[1::2], strict=True)}


def _durability(facts: Facts, settings: dict[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    if "sync" in facts.durabilities:
        asserted = " (asserted in the URL, not seen)" if facts.info.get("aof_enabled") != "1" else ""
        findings.append(
            Finding("ok", "durability sync", f"every commit is on disk (appendfsync always) before its reply{asserted}")
        )
    else:
        words, _, advice = str(refusal(facts, "sync")).partition(". ")
        findings.append(Finding("warning", "durability sync", f"not available: {words}", advice))
    if facts.evicts:
        return findings
    if facts.aof:
        lost = "nothing" if facts.syncs else "about the last second"
        findings.append(Finding("ok", "durability async", f"a crash of the server loses {lost}"))
    elif settings.get("save", "unknown"):
        findings.append(
            Finding("note", "durability async", "a crash loses what was written since the last snapshot", _ALWAYS)
        )
    else:
        findings.append(
            Finding(
                "warning", "durability async", "the server keeps nothing on disk: a restart loses everything", _ALWAYS
            )
        )
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        findings.append(
            Finding("error", "append-only file", "the last write to it failed", "look at the server's disk")
        )
    return findings


def _memory(facts: Facts) -> list[Finding]:
    policy = facts.policy or "unknown"
    if facts.evicts:
        return [
            Finding(
                "error",
                "memory",
                f"maxmemory-policy {policy} removes keys of the store when the memory is full",
                "CONFIG SET maxmemory-policy noeviction",
            )
        ]
    used = int(facts.info.get("used_memory", "0"))
    if not facts.memory_max:
        return [
            Finding("note", "memory", f"{used:,} bytes used, no maxmemory", "set maxmemory below what the machine has")
        ]
    level = "ok" if used < facts.memory_max * (1 - FREE_SHARE_MIN) else "warning"
    advice = "" if level == "ok" else "raise maxmemory, or let the feed be kept for less time"
    return [Finding(level, "memory", f"{used:,} of {facts.memory_max:,} bytes used, policy {policy}", advice)]  # type: ignore[arg-type]


def _replicas(servers: Servers, facts: Facts, settings: dict[str, str], *, replicated: bool) -> list[Finding]:
    wait = servers.url.wait
    if not replicated:
        level = "warning" if wait else "note"
        text = (
            f"none, and the URL waits for {wait}: every commit will be in doubt"
            if wait
            else "none: the disk of this server is the only copy"
        )
        return [Finding(level, "replicas", text)]  # type: ignore[arg-type]
    text = f"{facts.replicas} connected"
    if wait:
        return [Finding("ok", "replicas", f"{text}; a commit is acknowledged when {wait} of them have it")]
    least = settings.get("min-replicas-to-write", "0")
    return [
        Finding(
            "note",
            "replicas",
            f"{text}; min-replicas-to-write {least}. Replication is asynchronous: a failover may lose the latest commits, "
            "whose versions are then never given out again",
            "add ?wait=1 to the URL to acknowledge only what a replica has too",
        )
    ]
