"""Options of the HTTP side that keep strangers in bounds: limits, time limits, keys, TLS, CORS."""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError
from ...engine.options.option import POSITIVE, SECONDS, SECONDS_OR_NONE, UNLIMITED, Bounds, flag, option
from .keys import KeyLine, read_key_file

# Options that the environment may set as well; see auth.py.
ENVIRONMENT = {"api_key": ("VSERVE_API_KEY", "VLLM_API_KEY"), "admin_api_key": ("VSERVE_ADMIN_API_KEY",)}


def json_list(name: str, text: str) -> list[str]:
    """The strings in an option that is a JSON list. Raises ConfigError."""
    if problem := _json_list(text):
        raise ConfigError(f"{flag(name)} is {text!r}: {problem}")
    values: list[str] = json.loads(text)
    return values


def _json_list(text: str) -> str | None:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return None
    return "it must be a JSON list of strings, such as '[\"*\"]'"


def _file(path: str) -> str | None:
    return None if Path(path).is_file() else "it is no file, give the path of one"


def _keys(keys: tuple[str, ...]) -> str | None:
    return None if all(map(str.strip, keys)) else "a key is empty, leave it out"


@dataclass(frozen=True)
class HttpConfig:
    max_num_queued_reqs: int | None = option(
        None, "requests that may wait for a place in the batch, choices counted one by one; beyond them 429; 0: no "
        "limit (default: 4 times max_num_seqs)", group="limits", bounds=UNLIMITED,
    )  # fmt: skip
    max_num_queued_tokens: int | None = option(
        None,
        "prompt tokens that may wait; 0: no limit (default: 4 times what the KV cache holds)",
        group="limits",
        bounds=UNLIMITED,
    )
    request_timeout: float = option(
        0.0,
        "seconds that a request may take as a whole, from the end of its head on; 0: no limit",
        group="limits",
        bounds=SECONDS_OR_NONE,
    )
    queue_timeout: float = option(
        0.0, "seconds that a request may wait to be started; 0: no limit", group="limits", bounds=SECONDS_OR_NONE
    )
    timeout_keep_alive: float = option(
        75.0, "seconds until a connection without a request is closed; more than the idle time-out of a load balancer "
        "in front", group="limits", bounds=SECONDS,
    )  # fmt: skip
    header_timeout: float = option(10.0, "seconds for the head of a request to arrive", group="limits", bounds=SECONDS)
    body_timeout: float = option(60.0, "seconds for the body of a request to arrive", group="limits", bounds=SECONDS)
    write_timeout: float = option(
        60.0, "seconds after which a client that does not read its answer is dropped", group="limits", bounds=SECONDS
    )
    max_body_size: int | None = option(
        None, "bytes of a request's body; beyond them 413 (default: 64 for each token of the context, 8 MiB at least)",
        group="limits", bounds=POSITIVE,
    )  # fmt: skip
    max_answer_bytes: int | None = option(
        None, "bytes of memory that one answer may take which is not streamed, or stored, if each choice is as long as "
        "it may be; beyond them 400; 0: no limit (default: what a single choice needs that fills the context, with 20 "
        "log-probabilities a token, 256 MiB at least; of embeddings what 2048 vectors need)",
        group="limits", bounds=UNLIMITED,
    )  # fmt: skip
    max_header_size: int = option(
        64 << 10, "bytes of a request's headers; beyond them 431", group="limits", bounds=POSITIVE
    )
    max_header_count: int = option(100, "headers of a request; beyond them 431", group="limits", bounds=POSITIVE)
    max_request_line: int = option(
        8 << 10, "bytes of a request's URL; beyond them 414", group="limits", bounds=POSITIVE
    )
    max_connections: int | None = option(
        None, "open connections; the one idle longest makes room for a new one (default: what the limit of open files "
        "allows)", group="limits", bounds=POSITIVE,
    )  # fmt: skip

    api_key: tuple[str, ...] = option(
        (), "keys, one of which requests must bring; also from VSERVE_API_KEY and VLLM_API_KEY, which `ps` does not "
        "show", group="security", secret=True, problem=_keys,
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "file with such keys, one a line, each with what may be said of it: KEY name=ada requests-per-minute=60 "
        "tokens-per-minute=100000", group="security", problem=_file,
    )  # fmt: skip
    key_requests_per_minute: int = option(
        0, "requests to the model that each key may make in a minute, where its file says nothing else; 0: no limit",
        group="security", bounds=UNLIMITED,
    )  # fmt: skip
    key_tokens_per_minute: int = option(
        0, "tokens of prompts and answers that each key may use in a minute, where its file says nothing else; 0: no "
        "limit", group="security", bounds=UNLIMITED,
    )  # fmt: skip
    max_open_requests: int = option(
        0, "requests that each key may have open at once, waiting ones and choices counted one by one, over all API "
        "processes, where its file (max-open-requests=8) says nothing else; 0: no limit, the queue is fair between "
        "keys all the same", group="security", bounds=UNLIMITED,
    )  # fmt: skip
    admin_api_key: tuple[str, ...] = option(
        (), "keys for what controls the server (default: any of the others); also from VSERVE_ADMIN_API_KEY",
        group="security", secret=True, problem=_keys,
    )  # fmt: skip
    admin_api_key_file: str | None = option(None, "file with such keys, one a line", group="security", problem=_file)
    priority_keys: tuple[str, ...] = option(
        (), "names of the keys, as the log has them, whose requests may set `priority`; *: all of them (default: admin "
        "keys alone; where no key is asked for, anybody may)", group="security",
    )  # fmt: skip
    isolate_keys: bool = option(
        True, "prompts find in the prefix cache what the same key has asked and nobody else has; off: keys share it, "
        "and each can tell by cached_tokens and by the time what others have asked", group="security",
    )  # fmt: skip
    public_metrics: bool = option(False, "/metrics needs no key", group="security")
    allowed_origins: str | None = option(
        None, "CORS: JSON list of origins (default: any where a key is asked for, else this server's own page and "
        "pages of this machine, and POSTs of other pages are refused)", group="security", problem=_json_list,
    )  # fmt: skip
    allowed_methods: str = option('["*"]', "CORS: JSON list of methods", group="security", problem=_json_list)
    allowed_headers: str = option('["*"]', "CORS: JSON list of headers", group="security", problem=_json_list)
    allow_credentials: bool = option(False, "CORS: let browsers send credentials", group="security")

    ssl_keyfile: str | None = option(None, "private key, PEM", group="TLS", problem=_file)
    ssl_certfile: str | None = option(None, "certificate and its chain, PEM; turns TLS on", group="TLS", problem=_file)
    ssl_keyfile_password: str | None = option(None, "password of the private key", group="TLS", secret=True)
    ssl_ca_certs: str | None = option(
        None, "authorities whose client certificates are accepted, PEM", group="TLS", problem=_file
    )
    ssl_cert_reqs: int = option(
        0, "client certificates: 0 not asked for, 1 optional, 2 required", group="TLS", bounds=Bounds(0, 2)
    )
    ssl_ciphers: str | None = option(None, "ciphers in OpenSSL's notation (default: OpenSSL's)", group="TLS")

    def key_lines(self, name: str) -> list[KeyLine]:
        """The keys of api_key or admin_api_key: of their file, then of the option, then of the environment. Raises
        ConfigError."""
        path: str | None = getattr(self, f"{name}_file")
        given: tuple[str, ...] = getattr(self, name)
        variables = [(variable, os.environ.get(variable, "").strip()) for variable in ENVIRONMENT[name]]
        lines = [] if path is None else read_key_file(path, flag(f"{name}_file"))
        lines += [
            KeyLine(key.strip(), f"{flag(name)[2:]}-{number}", None, None, None) for number, key in enumerate(given, 1)
        ]
        return lines + [KeyLine(key, variable, None, None, None) for variable, key in variables if key]

    def check_keys(self) -> None:
        """Raises ConfigError."""
        names = {line.name for name in ENVIRONMENT for line in self.key_lines(name)}
        if unknown := next((name for name in self.priority_keys if name not in {*names, "*"}), None):
            raise ConfigError(
                f"--priority-keys is {unknown!r}: no key has this name; a line of --api-key-file gives one by name=…, "
                "and the log of requests tells those of the others, such as api-key-1"
            )

    def check_tls(self) -> None:
        """A certificate that cannot be served is said before the model is loaded. Raises ConfigError."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None or self.ssl_ca_certs is not None:
                raise ConfigError("--ssl-certfile is missing: TLS needs a certificate")
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password or "")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--ssl-certfile {self.ssl_certfile!r} cannot be used ({error}); give a PEM certificate, its key with "
                "--ssl-keyfile, and the key's password with --ssl-keyfile-password"
            ) from None
        if self.ssl_ciphers is not None:
            try:
                context.set_ciphers(self.ssl_ciphers)
            except ssl.SSLError:
                raise ConfigError(f"--ssl-ciphers is {self.ssl_ciphers!r}: OpenSSL knows no such cipher") from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"--ssl-ca-certs {self.ssl_ca_certs!r} holds no certificates ({error})") from None
        elif self.ssl_cert_reqs:
            raise ConfigError(f"--ssl-cert-reqs is {self.ssl_cert_reqs}: name the authorities with --ssl-ca-certs")
