"""The OpenAPI document as one page of HTML, for people. No script and nothing from elsewhere: it works without a
network; and it says nothing of this server: it needs no key."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 } summary b { display: inline-block; min-width: 4.5rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem } h3 { margin: 1.5rem 0 0 }
td { border-top: 1px solid #8884; padding: .25rem .5rem; vertical-align: top; overflow-wrap: anywhere }
td:first-child { width: 14rem } td:nth-child(2) { width: 14rem }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    paths: Mapping[str, Mapping[str, Any]] = document["paths"]
    schemas: Mapping[str, Any] = document["components"]["schemas"]
    operations = [_operation(path, method, one) for path, methods in paths.items() for method, one in methods.items()]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>What each route takes and gives. Programs read the same at <code>openapi.json</code>.</p>"
        f"{''.join(operations)}<h2>Bodies</h2>{''.join(_schema(name, schemas[name]) for name in sorted(schemas))}"
        "</body></html>"
    )


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{one['name']}, in the {one['in']}",
            _kind(one.get("schema", {})),
            one.get("schema", {}).get("description", ""),
        )
        for one in operation.get("parameters", ())
    ]
    if "requestBody" in operation:
        rows.append(("body", _contents(operation["requestBody"]), ""))
    rows += [(code, _contents(answer), answer["description"]) for code, answer in operation["responses"].items()]
    said = escape(operation.get("description") or operation.get("summary") or "")
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary><p>{said}</p>"
        f"{_table(rows)}</details>"
    )


def _contents(holder: Mapping[str, Any]) -> str:
    kinds = [(kind, _kind(content.get("schema", {}))) for kind, content in holder.get("content", {}).items()]
    return "<br>".join(shown if kind == "application/json" else f"{escape(kind)}: {shown}" for kind, shown in kinds)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (f"{field}{' (required)' if field in required else ''}", _kind(one), one.get("description", ""))
        for field, one in schema.get("properties", {}).items()
    ]
    head = f'<h3 id="{escape(name)}">{escape(name)}</h3>'
    said = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return head + said + (_table(rows) if rows else f"<p>{_kind(schema)}</p>")


def _table(rows: list[tuple[str, str, str]]) -> str:
    """Names and words as they are, kinds as HTML."""
    cells = (
        f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{escape(said)}</td></tr>"
        for name, kind, said in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _kind(schema: Any) -> str:
    """What a value may be, as HTML, with links to the bodies that have a name."""
    if not isinstance(schema, dict):
        return "anything"
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(map(_kind, schema[several])))
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if "enum" in schema:
        return ", ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if "contentSchema" in schema:  # the data of an event
        return _kind(schema["contentSchema"])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_kind(schema.get('items'))}"
    if kind == "object" and "data" in schema.get("properties", {}):
        return f"events of {_kind(schema['properties']['data'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    limits = [
        f"{sign} {schema[name]:g}"
        for name, sign in (
            ("minimum", "≥"),
            ("maximum", "≤"),
            ("exclusiveMinimum", "&gt;"),
            ("exclusiveMaximum", "&lt;"),
        )
        if name in schema
    ]
    return " ".join([escape(str(kind)) if kind else "anything", *limits])
