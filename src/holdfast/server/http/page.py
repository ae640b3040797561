"""The OpenAPI document as a page: plain HTML, nothing loaded from elsewhere, nothing that runs."""

from __future__ import annotations

import json
from html import escape
from typing import Any, Final

STYLE: Final = (
    "body{font:15px/1.5 sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}code,pre{font:13px monospace}"
    "pre{background:#f4f4f4;padding:.6rem;overflow:auto}h3{margin:1.6rem 0 .2rem}td,th{text-align:left;padding:.1rem .8rem .1rem 0;"
    "vertical-align:top}.method{display:inline-block;min-width:4rem;font-weight:bold}"
)


def page(document: dict[str, Any]) -> str:
    """The whole page."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{escape(info['title'])}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])} Every path but the open ones needs ",
        "<code>Authorization: Bearer hf_…</code>. The same for programs: <a href=/openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation))
    parts.append("<h2>Shapes</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<h3 id={escape(name)}>{escape(name)}</h3><pre>{escape(json.dumps(schema, indent=1))}</pre>")
    return "".join([*parts, "</body></html>"])


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(each['name'])}</code><td>{each['in']}<td>{escape(each.get('description', ''))}</tr>"
        for each in operation["parameters"]
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        rows.append(f"<tr><td>body<td><td>{_shape(body)}</tr>")
    for status, response in operation["responses"].items():
        rows.append(f"<tr><td>{status}<td><td>{escape(response['description'])}</tr>")
    head = f"<h3><span class=method>{method.upper()}</span> <code>{escape(path)}</code></h3>"
    return f"{head}<p>{escape(operation['summary'])}</p><table>{''.join(rows)}</table>"


def _shape(schema: dict[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return f"<a href=#{escape(name)}>{escape(name)}</a>" if name else "any JSON"
