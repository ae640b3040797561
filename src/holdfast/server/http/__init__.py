"""The HTTP port of a keeper: document D's messages, REST, the feed as events, and an OpenAPI document.

`make_app` makes it, `serve_http` runs it. Reading order: endpoint.py, app.py, then records.py as an example of a part;
steps.py and messages.py for transactions and envelopes; protocol.py and serving.py for what happens to connections.
"""

from holdfast.server.http.app import make_app
from holdfast.server.http.limits import Limits
from holdfast.server.http.serving import HttpServer, serve_http

__all__ = ["HttpServer", "Limits", "make_app", "serve_http"]
