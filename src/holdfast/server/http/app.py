"""The HTTP port as an application: who asks, for what, and the answer, in that order.

A request passes three things. `Front` gives it a name for the logs, and turns what nobody expected into a 500 that tells
nothing. `Resource` is one path: it authenticates before anything is read, reads path, query and headers, asks for space and rate,
and only then reads the body, all by the endpoint's types, and runs it. The endpoint does the work. What a request takes
meanwhile is its share (`shares.py`).

What every answer has: no caching, no guessing of types, the request's X-Request-Id and traceparent. There is no CORS: a
browser's page of another origin gets nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.clock import elapsed_s
from holdfast.errors import AuthenticationFailed, Error, NotFound, Unavailable
from holdfast.identity import EVERY_SPACE, Identity
from holdfast.server.http.endpoint import NOT_MODIFIED, Answer, Asked, Call, Endpoint
from holdfast.server.http.failures import MethodNotAllowed, NoRoom, failure_of, headers_of, status_of
from holdfast.server.http.limits import Limits
from holdfast.server.http.port import Port
from holdfast.server.http.protocol import CONNECTION
from holdfast.server.http.reading import check_path, read_as, read_headers, read_json, read_query, read_struct
from holdfast.server.http.shapes import InSpace
from holdfast.server.http.shares import Share
from holdfast.server.http.table import ENDPOINTS
from holdfast.server.http.tracing import bind, bound_request, current
from holdfast.server.refusals import told
from holdfast.server.served import Served

NOBODY: Final = Identity("nobody", "agent", "")
REFUSED: Final = "a valid token is needed: Authorization: Bearer hf_…"
"""The one answer to a token that is missing, malformed, unknown, ended or revoked."""
_SECURITY: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

log = logging.getLogger("holdfast.http")


def make_app(
    keeper: Served,
    *,
    metrics: Callable[[], bytes] | None = None,
    metrics_open: bool = False,
    limits: Limits | None = None,
) -> Starlette:
    """The HTTP port of a keeper, to be run by `serve_http`.

    `metrics` gives the text of /metrics, which only administrators may read unless `metrics_open`.
    """
    port = Port(keeper, metrics, limits or Limits(), metrics_open=metrics_open)
    by_path: dict[str, dict[str, Endpoint]] = {}
    for each in ENDPOINTS:
        by_path.setdefault(each.path, {})[each.method] = each
    routes = [Route(_pattern(path), Resource(port, methods)) for path, methods in by_path.items()]
    nowhere = Route("/{path:rest}", Resource(port, {}))
    app = Starlette(routes=[*routes, nowhere], middleware=[Middleware(Front)])
    app.state.port = port
    return app


def _pattern(path: str) -> str:
    """Names may hold slashes, and stand at the end."""
    return re.sub(r"\{(key|name)\}$", r"{\1:rest}", path)


class _Rest(Convertor[str]):
    """The rest of a path, whatever it is: Starlette's own stops at a line's end."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("rest", _Rest())


class Front:
    """Around everything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        heard = told.set([])
        try:
            with bound_request(Headers(scope=scope)) as bound:
                await self._run(scope, receive, send, bound)
        finally:
            told.reset(heard)

    async def _run(self, scope: Scope, receive: Receive, send: Send, bound: Mapping[str, str]) -> None:
        began, status = elapsed_s(), 0
        echoed = {"X-Request-Id": bound["request_id"], **_SECURITY}
        if "traceparent" in bound:
            echoed["traceparent"] = bound["traceparent"]

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(echoed)
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception as exc:
            log.exception("%s %s failed", scope["method"], scope["path"], extra=dict(current.get()))
            if status:
                raise
            await _failed(exc)(scope, receive, answer)
        finally:
            took_ms = round((elapsed_s() - began) * 1000, 3)
            log.info(
                "%s %s %d",
                scope["method"],
                scope["path"],
                status,
                extra={**current.get(), "status": status, "took_ms": took_ms},
            )


class Resource:
    """One path and its methods."""

    def __init__(self, port: Port, methods: dict[str, Endpoint]) -> None:
        self._port = port
        self._methods = methods
        self._is_open = bool(methods) and all(each.is_open for each in methods.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        share: Share | None = None
        try:
            try:
                identity = NOBODY if self._open_to(request) else self._authenticate(request)
                share = Share(self._port.shares, identity)
                response = await self._answer(request, identity, share)
            except Error as error:
                if status_of(error) >= Error.http_status and not isinstance(error, NoRoom):  # which was told, and paced
                    log.warning("%s %s: %s", request.method, scope["path"], error, extra=dict(current.get()))
                response = _failed(error)
            await response(scope, receive, send)
        finally:
            if share is not None:
                share.leave()

    async def _answer(self, request: Request, identity: Identity, share: Share) -> Response:
        began = elapsed_s()
        check_path(request.scope.get("raw_path", b""))
        if not self._methods:
            raise NotFound("there is nothing at this path; /docs tells what there is")
        called = self._methods.get("GET" if request.method == "HEAD" else request.method)
        if called is None or (request.method == "HEAD" and called.raw):
            raise MethodNotAllowed(f"{request.method} is not possible here", [*self._methods])
        if self._port.stopping.is_set() and not called.is_open:
            raise Unavailable("the server is stopping; repeat the request when it is back")
        call = Call(self._port, identity, request.receive, _asked(called, request, began))
        try:
            values = await self._values(called, request, call, share)
            if not called.is_open:
                share.run()
            answer = await called.run(call, **values)
        except Error as error:
            call.refused(error)
            raise
        if isinstance(answer, Response):
            return answer
        if not isinstance(answer, Answer):
            answer = Answer(answer)
        if answer.status == NOT_MODIFIED:  # which has no body, whatever a body would say
            return Response(status_code=NOT_MODIFIED, headers=answer.headers)
        return _json(answer.body, answer.status, answer.headers)

    def _open_to(self, request: Request) -> bool:
        return self._is_open or (self._port.metrics_open and request.scope["path"] == "/metrics")

    def _authenticate(self, request: Request) -> Identity:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.startswith("hf_"):
            try:
                identity = self._port.keeper.authenticate(token)
            except AuthenticationFailed:
                pass
            else:
                bind(agent=identity.agent, **({} if identity.space == EVERY_SPACE else {"space": identity.space}))
                self._admit(request, identity)
                return identity
        refused = AuthenticationFailed(REFUSED)
        self._turned_away(request, refused)
        raise refused from None

    def _admit(self, request: Request, identity: Identity) -> None:
        """Its connection counts for this token from now on; NoRoom if there is none."""
        connection, admission = request.scope["state"][CONNECTION](), self._port.admission
        if connection is None or admission.known_as(connection) == identity.token_id:
            return
        admission.leave(connection)
        try:
            admission.enter(connection, identity, None)
        except Unavailable as exc:
            refused = NoRoom(str(exc))
            self._turned_away(request, refused)
            raise refused from exc

    def _turned_away(self, request: Request, error: Error) -> None:
        client = request.client
        self._port.keeper.turned_away("http", error, "" if client is None else f"{client.host}:{client.port}")

    async def _values(self, called: Endpoint, request: Request, call: Call, share: Share) -> dict[str, Any]:
        types = called.types
        query = read_query(request.scope["query_string"])
        values: dict[str, Any] = {}
        if "path" in types:
            values["path"] = read_struct(request.path_params, types["path"], "path")
        asked = read_struct(query, types.get("query", _NoQuery), "query")
        if "query" in types:
            values["query"] = asked
        if "headers" in types:
            values["headers"] = read_headers(request.headers, types["headers"])
        if "body" in types:
            if isinstance(at := values.get("path"), InSpace):
                call.enter(at.space)
            values["body"] = await self._body(types["body"], request, call, share)
        return values

    async def _body(self, as_type: Any, request: Request, call: Call, share: Share) -> Any:
        """The body, of somebody who could have what it asks for; one that comes to nothing costs as much as a small one."""
        keeper = self._port.keeper
        keeper.look_at_rate(call.identity)

        def read(data: bytes) -> Any:
            body = read_json(data)
            return body if as_type is Any else read_as(body, as_type, "body")

        try:
            return await self._port.shares.read(await share.body(request), read)
        except Error:
            keeper.charge(call.identity)
            raise


def _asked(called: Endpoint, request: Request, began: float) -> Asked:
    """The path after its space is the key, as far as there is one: /v1/spaces/contoso/records/cash is about records/cash."""
    space = str(request.path_params.get("space", ""))
    _, _, key = request.scope["path"].partition(f"/spaces/{space}/") if space else ("", "", "")
    return Asked(called.verb, space, key, began)


class _NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """An endpoint without parameters."""


def _json(body: Any, status: int, headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _failed(error: Exception) -> Response:
    return _json(failure_of(error), status_of(error), headers_of(error))
