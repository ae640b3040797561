"""What operators and their machines ask: is it alive, is it ready, how is it doing, and how is it used."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec
from starlette.responses import Response

from holdfast.errors import NotFound, Unavailable
from holdfast.middleware.verbs import ADMIN
from holdfast.server.http.endpoint import Call, endpoint

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


class Status(msgspec.Struct, frozen=True):
    """How it is."""

    status: str


@endpoint("GET", "/healthz", is_open=True)
async def is_alive(call: Call) -> Status:
    """Answers as long as the server runs."""
    return Status("alive")


@endpoint("GET", "/readyz", is_open=True, errors=(Unavailable,))
async def is_ready(call: Call) -> Status:
    """Whether requests are taken; the reason when they are not."""
    reason = "the server is stopping" if call.port.stopping.is_set() else call.port.keeper.ready()
    if reason is not None:
        raise Unavailable(reason)
    return Status("ready")


@endpoint("GET", "/metrics", errors=(NotFound,), media=("text/plain",), verb=ADMIN, raw=True)
async def read_metrics(call: Call) -> str:
    """Metrics in Prometheus' text format. For administrators, unless the operator has opened them."""
    port = call.port
    if not port.metrics_open:
        call.require_admin("read the metrics, which tell of every space")
    if port.metrics is None:
        raise NotFound("this server keeps no metrics")
    return Response(port.metrics(), headers={"Content-Type": PROMETHEUS})  # type: ignore[return-value]


@endpoint("GET", "/openapi.json", is_open=True, raw=True)
async def read_openapi(call: Call) -> dict[str, Any]:
    """This document."""
    return Response(_document(), media_type="application/json")  # type: ignore[return-value]


@endpoint("GET", "/docs", is_open=True, media=("text/html",), raw=True)
async def read_docs(call: Call) -> str:
    """This document, for people."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return Response(_page(), media_type="text/html", headers={"Content-Security-Policy": policy})  # type: ignore[return-value]


@cache
def _document() -> bytes:
    from holdfast.server.http.openapi import document

    return msgspec.json.format(msgspec.json.encode(document()), indent=1)


@cache
def _page() -> str:
    from holdfast.server.http.openapi import document
    from holdfast.server.http.page import page

    return page(document())


ENDPOINTS = (is_alive, is_ready, read_metrics, read_openapi, read_docs)
