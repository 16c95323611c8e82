"""JSON Schemas of clients: what of them a grammar can honour, and which library does. What neither honours is refused,
never ignored. Found out by experiment (xgrammar 0.2.8, llguidance 1.9.1): random outputs against `jsonschema`."""

from __future__ import annotations

from reprlib import repr as shorten
from typing import Any
from urllib.parse import unquote

from .finite import texts_of
from .regex import RegexError, translate

MAX_DEPTH = 100

# Where subschemas are.
ONE = ("additionalItems", "additionalProperties", "items")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "$defs", "definitions")

NOBODY = {
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef",
    "$recursiveRef", "divisibleBy", "disallow", "extends",
}  # fmt: skip
LLGUIDANCE = {
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems",
    "properties", "required", "type",
}  # fmt: skip
# xgrammar ignores many keywords beside others: what it honours together, by the type or the keyword that comes first.
# (Length limits let control characters into its strings, and its formats and patterns are loose.)
XGRAMMAR: dict[str, set[str]] = {
    "$ref": set(),
    "anyOf": set(),
    "enum": {"type"},
    "const": {"type"},
    "array": {"items", "maxItems", "minItems", "prefixItems"},
    "boolean": set(),
    "integer": {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"},
    "null": set(),
    "number": {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"},
    "object": {"additionalProperties", "properties", "required"},
    "string": set(),
}
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
# Others that JSON Schema defines. What it does not define is an annotation.
STRICT_FORMATS = {
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
    "uri-reference", "uri-template",
}  # fmt: skip
TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
OLD_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09")  # where `items` may be a list
MAX_INTEGER = 2**53  # beyond it, llguidance counts as JavaScript does


ANNOTATIONS = {
    "$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip


class SchemaError(ValueError):
    """One sentence for whoever wrote the schema."""


class UnknownType(SchemaError):
    """A slip, where other errors may be about what is right and cannot be followed."""


class Schema:
    """A JSON Schema, ready for the libraries.

    `root`: the schema with no-ops removed and patterns in Rust's syntax. An object that lists its properties and says
    nothing of others allows no others: whoever wants them says so. (Schemas that combine several for one object are
    left open, unless `additional_properties` is False: each part would close out the others' properties.)
    `obstacle`: the first keyword that keeps xgrammar from it; None where it can do it.
    Raises SchemaError.
    """

    def __init__(self, root: Any, *, additional_properties: bool = True) -> None:
        if root is True:
            root = {}
        if not isinstance(root, dict):
            raise SchemaError("the schema must be a JSON object that some value satisfies.")
        self.root: dict[str, Any] = root
        self.obstacle: str | None = None
        dialect = root.pop("$schema", None)
        self._old = isinstance(dialect, str) and any(draft in dialect for draft in OLD_DRAFTS)
        self._draft4 = isinstance(dialect, str) and "draft-04" in dialect
        if isinstance(dialect, str) and "draft-03" in dialect:
            raise SchemaError("the schema's '$schema' draft-03 is not supported; use a later draft.")
        if self._old:
            root["$schema"] = dialect
        self._open: list[dict[str, Any]] = []  # objects that list their properties and say nothing of others
        self._combines = False
        self._seen: set[int] = set()
        self._referred: list[Any] = [root]
        while self._referred:
            self._visit(self._referred.pop(), 0)
        if not self._combines or not additional_properties:
            for schema in self._open:
                schema["additionalProperties"] = False
        elif self._open:
            self._hinder("properties")

    def _hinder(self, keyword: str) -> None:
        self.obstacle = self.obstacle or keyword

    def _visit(self, schema: Any, depth: int) -> None:
        if isinstance(schema, bool):
            self._hinder("false" if schema is False else "true")
            return
        if not isinstance(schema, dict):
            raise SchemaError(f"a schema must be an object or a boolean, but one is {shorten(schema)}.")
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if depth > MAX_DEPTH:
            raise SchemaError(f"the schema is nested deeper than {MAX_DEPTH} levels.")
        self._clean(schema)
        self._check(schema)
        _name_all(schema)
        self._choose(schema)
        for name in ONE:
            if name in schema and not (name == "additionalProperties" and isinstance(schema[name], bool)):
                for one in schema[name] if isinstance(schema[name], list) else [schema[name]]:
                    self._visit(one, depth + 1)
        for name in LISTS:
            for one in schema.get(name, ()):
                self._visit(one, depth + 1)
        for name in MAPS:
            for one in schema.get(name, {}).values():
                self._visit(one, depth + 1)

    def _clean(self, schema: dict[str, Any]) -> None:
        """Removes what says nothing, and what only the libraries would read."""
        schema.pop("x-guidance", None)
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        for name in ("minItems", "minLength", "minProperties"):
            if schema.get(name) == 0:
                del schema[name]
        for name in ("required", "properties", "patternProperties"):
            if name in schema and not schema[name]:
                del schema[name]
        types = schema.get("type")
        if isinstance(types, list) and len(types) == 1:
            schema["type"] = types[0]
        given = schema.get("format")
        if given in STRICT_FORMATS and "string" in _types(schema):
            raise SchemaError(f"the schema's 'format' {given!r} is not supported; supported are {_list(FORMATS)}.")
        if "format" in schema and (given not in FORMATS or "string" not in _types(schema)):
            del schema["format"]
        elif given in ("date-time", "time") and "pattern" not in schema:
            schema["pattern"] = ":..:[0-5]"  # leap seconds are right, but hardly a library reads them

    def _check(self, schema: dict[str, Any]) -> None:
        if unsupported := [name for name in schema if name in NOBODY]:
            raise SchemaError(f"the schema's keyword {unsupported[0]!r} is not supported.")
        for name in LISTS:
            if name in schema and (not isinstance(schema[name], list) or not schema[name]):
                raise SchemaError(f"the schema's {name!r} must be a list of schemas that is not empty.")
        for name in MAPS:
            if not isinstance(schema.get(name, {}), dict):
                raise SchemaError(f"the schema's {name!r} must be an object.")
        if schema is not self.root and ("$id" in schema or (self._draft4 and "id" in schema)):
            raise SchemaError("the schema's '$id' is supported at its top only.")
        if any(not isinstance(name, str) or name not in TYPES for name in _types(schema)):
            raise UnknownType(f"the schema's 'type' {shorten(schema['type'])} must be of {_list(TYPES)}.")
        if isinstance(schema.get("items"), list) and not self._old:
            raise SchemaError("the schema's 'items' must be a schema; use 'prefixItems' for a list of them.")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError("the schema's 'required' must be a list of property names.")
        for name in ("exclusiveMaximum", "exclusiveMinimum"):
            if isinstance(schema.get(name), bool) and not self._draft4:
                raise SchemaError(f"the schema's {name!r} must be a number.")
        if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
            raise SchemaError("the schema's 'enum' must be a list that is not empty.")
        for value in (*schema.get("enum", ()), schema.get("const")):
            _check_value(value)
        # A key that comes twice counts once for whoever reads the output, but twice for a grammar.
        if schema.get("minProperties", 0) != 1 and "minProperties" in schema:
            listed = set(schema.get("properties", ())) <= set(required)
            if schema.get("additionalProperties") is not False or "patternProperties" in schema or not listed:
                raise SchemaError(
                    "the schema's 'minProperties' above 1 is not supported where properties may be any; use 'required'."
                )
        if "pattern" in schema:
            schema["pattern"] = _regex(schema["pattern"], "pattern")

    def _choose(self, schema: dict[str, Any]) -> None:
        """Notes what keeps xgrammar from this schema; follows its reference."""
        keywords = LLGUIDANCE & schema.keys()
        if "$ref" in schema:
            self._follow(schema["$ref"])
        if "allOf" in schema or (len(keywords) > 1 and keywords & {"$ref", "anyOf", "oneOf"}):
            self._combines = True
        if (
            "properties" in schema
            and "object" in _types(schema)
            and not schema.keys() & {"additionalProperties", "patternProperties"}
        ):
            if set(schema.get("required", ())) <= schema["properties"].keys():
                self._open.append(schema)
            else:
                self._hinder("required")
        if not keywords:
            return
        kind = next((name for name in ("$ref", "anyOf", "enum", "const") if name in schema), schema.get("type"))
        if not isinstance(kind, str):
            if keywords == {"type"} and not set(schema["type"]) & {"array", "object"}:
                return
            self._hinder(min(keywords))
        elif others := keywords - XGRAMMAR[kind] - {kind, "type" if kind in TYPES else kind}:
            self._hinder(min(others))
        elif kind in ("enum", "const") and "type" in schema:
            if not all(_is_a(value, _types(schema)) for value in schema.get("enum", [schema.get("const")])):
                self._hinder("enum")
        elif kind == "object" and "properties" in schema and schema.get("additionalProperties", False) is not False:
            self._hinder("additionalProperties")
        elif kind == "object" and not set(schema.get("required", ())) <= schema.get("properties", {}).keys():
            self._hinder("required")

    def _follow(self, reference: Any) -> None:
        if not isinstance(reference, str):
            raise SchemaError("the schema's '$ref' must be a string.")
        if not reference.startswith("#"):
            raise SchemaError(
                f"the schema's '$ref' {shorten(reference)} leads outside; only references within it (#/…) are followed."
            )
        if "%" in reference or "~" in reference or (len(reference) > 1 and reference[1] != "/"):
            self._hinder("$ref")
        if reference == "#" or not reference.startswith("#/"):
            return  # an anchor: llguidance finds it, or says so
        target: Any = self.root
        for part in reference[2:].split("/"):
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name)] if isinstance(target, list) else target[name]
            except (LookupError, TypeError, ValueError):
                raise SchemaError(f"the schema's '$ref' {shorten(reference)} leads nowhere.") from None
        self._referred.append(target)


def _name_all(schema: dict[str, Any]) -> None:
    """Patterns in Rust's syntax. One that matches a few names only is written as properties: llguidance finds an object
    unsatisfiable where all names of a pattern are listed as well. Raises SchemaError.
    """
    patterns = schema.pop("patternProperties", {})
    kept = {}
    for pattern, one in patterns.items():
        regex = _regex(pattern, "patternProperties")
        if (names := texts_of(pattern)) is None:
            kept[regex] = one
            continue
        properties = schema["properties"] = dict(schema.get("properties", {}))
        schema.setdefault("additionalProperties", True)
        for name in names:
            properties[name] = one if name not in properties else {"allOf": [properties[name], one]}
    if kept:
        schema["patternProperties"] = kept


def without_annotations(schema: Any) -> Any:
    """A schema without what is written in it for people and models, which may be most of it."""
    if isinstance(schema, list):
        return [without_annotations(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name in ONE or name in LISTS:
            kept[name] = without_annotations(value)
        elif name in MAPS and isinstance(value, dict):
            kept[name] = {key: without_annotations(one) for key, one in value.items()}
        elif name not in ANNOTATIONS:
            kept[name] = value
    return kept


def _types(schema: dict[str, Any]) -> set[Any]:
    types = schema.get("type", TYPES)
    return set(map(str, types)) if isinstance(types, list | set) else {str(types)}


def _is_a(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool) or value is None:
        return ("boolean" if value is not None else "null") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and value == int(value))
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object") in types


def _check_value(value: Any) -> None:
    if isinstance(value, int | float) and abs(value) > MAX_INTEGER:
        raise SchemaError(f"the schema's value {shorten(value)} is beyond 2^53.")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_value(part)


def _regex(pattern: Any, keyword: str) -> str:
    if not isinstance(pattern, str):
        raise SchemaError(f"the schema's {keyword!r} must be a string.")
    try:
        return translate(pattern)
    except RegexError as error:
        raise SchemaError(f"the schema's {keyword!r} {shorten(pattern)} cannot be followed: {error}.") from None


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))
