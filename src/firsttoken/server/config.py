"""What a user may say about the HTTP server."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Literal

import msgspec

from firsttoken.core.errors import ConfigError
from firsttoken.core.parser_names import AUTO, REASONING_PARSERS, TOOL_PARSERS
from firsttoken.core.service import KeyRule, Targets
from firsttoken.core.targets_file import KEY_NAME
from firsttoken.observability.health import DEAD_AFTER_S
from firsttoken.observability.otlp.settings import Protocol, check_endpoint

MIB = 1 << 20
# JSON bytes a prompt may take per token of context: far above any real text (about 4, or 24 when a client escapes
# every character), so that only prompts that cannot fit are refused before they are parsed.
PROMPT_BYTES_PER_TOKEN = 64
# A step that is done for the first time may have kernels to compile, and an idle engine says nothing for half a second.
LEAST_HUNG_S = 5.0


HASHED = "sha256:"
# As a browser writes it: what is compared is the text.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_DIGEST = re.compile(HASHED + "[0-9a-fA-F]{64}")


class ApiKey(msgspec.Struct, frozen=True):
    """``name`` is "" for a key without a rule of its own, which may ask for everything. ``key`` is as it was given: it
    may be ``sha256:`` and the digest of the key in hex."""

    name: str
    key: str
    rule: KeyRule = KeyRule()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key.startswith(HASHED):
            return bytes.fromhex(self.key.removeprefix(HASHED))
        return hashlib.sha256(self.key.encode()).digest()


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the HTTP server, under the names of the command line (``--api-key`` is ``api_keys``).

    - ``port``: 0 takes a free one.
    - ``api_keys``: without any every caller is served. A key for which ``targets`` has a rule is given as NAME=KEY; any
      other text is a key as a whole. ``api_key_file`` says where more of them were read (`server.key_file`).
    - ``allow_origin``: pages of which origins a browser lets read answers (CORS); "*" is any.
    - ``max_body_bytes`` bounds a request's body (413 above it), ``max_messages`` a conversation, ``max_prompts`` the
      prompts of one completion request, ``max_request_cost`` what one request may cost (`server.cost`).
    - ``max_connections`` are held at once, and ``max_connections_per_ip`` from one address.
    - ``responses_store``: how many responses are kept to be asked for again, 0 for none.
    - ``drain_s``: how long running requests may take to finish after SIGTERM.
    - ``audit_log``: the file with a line for each request (`server.audit`), with prompts and answers if
      ``audit_content``.
    - ``server`` speaks HTTP: uvicorn with our own protocol, or granian, which has HTTP/2 (`server.granian_server`).
    - ``engine_restarts``: an engine that dies is started again so many times within five minutes at most, and one that
      says nothing for ``engine_hung_s`` seconds counts as dead.
    - ``prompt_templates``: a file of chats' beginnings that are tokenised at the start (`text.prompt_templates`).
    - ``raw_control_tokens``: what text that looks like a control token is in raw prompts: "parse" makes it one, as vLLM
      does, and "text" leaves it text, as it always is in chats.
    - ``otlp_endpoint``: the collector to which traces and metrics go, by ``otlp_protocol``; what is left out the
      environment may say (`observability.otlp.settings`).
    - ``ssl_certfile``: with it the port speaks TLS (`server.tls`); ``ssl_keyfile`` may be left out where that file has
      the key.
    - ``tool_parser`` and ``reasoning_parser``: how the model's answers are read (`text.answer_formats`).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    server: Literal["uvicorn", "granian"] = "uvicorn"
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    allow_origin: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    max_messages: int = 4096
    max_prompts: int = 128
    max_request_cost: int = 1 << 22
    responses_store: int = 1000
    max_connections: int = 16_384
    max_connections_per_ip: int | None = None
    drain_s: float = 30.0
    audit_log: str | None = None
    audit_content: bool = False
    engine_restarts: int = 3
    engine_hung_s: float = DEAD_AFTER_S
    prompt_templates: str | None = None
    raw_control_tokens: Literal["parse", "text"] = "parse"
    otlp_endpoint: str | None = None
    otlp_protocol: Protocol | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    targets: Targets = Targets()
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        for name in ("max_body_bytes", "max_messages", "max_prompts", "max_request_cost", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.responses_store < 0:
            raise ConfigError(f"responses_store must be 0 or more, got {self.responses_store}")
        if self.max_connections_per_ip is not None and self.max_connections_per_ip < 1:
            raise ConfigError(f"max_connections_per_ip must be at least 1, got {self.max_connections_per_ip}")
        if self.max_connections_per_ip is not None and self.server == "granian":
            raise ConfigError("max_connections_per_ip is not for the server granian: leave one of the two out")
        if not 0 <= self.drain_s < math.inf:
            raise ConfigError(f"drain_s must be a number of seconds, 0 or more, got {self.drain_s}")
        if self.engine_restarts < 0:
            raise ConfigError(f"engine_restarts must be 0 or more, got {self.engine_restarts}")
        if not LEAST_HUNG_S <= self.engine_hung_s < math.inf:
            raise ConfigError(
                f"engine_hung_s must be a number of seconds, {LEAST_HUNG_S:g} or more (a step may take long without "
                f"being stuck), got {self.engine_hung_s:g}"
            )
        check_endpoint(self.otlp_endpoint)
        if self.audit_content and self.audit_log is None:
            raise ConfigError("audit_content says what the audit log has: name its file with --audit-log")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(
                f"ssl_keyfile {self.ssl_keyfile} is the key of no certificate: give its certificate with --ssl-certfile"
            )
        for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r:.80}")
        for origin in self.allow_origin:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"allow_origin must be an origin as browsers send it, as https://app.example.com or "
                    f"http://localhost:3000 (no path, small letters), or * for any, got {origin!r:.200}"
                )
        keys = self.named_keys()
        # An empty key would let everybody in, and a header cannot carry other characters.
        if not all(
            one.key and one.key.isascii() and one.key.isprintable() and one.key == one.key.strip() for one in keys
        ):
            raise ConfigError("an API key must be printable ASCII, not empty, without blanks around it")
        if any(one.key.startswith(HASHED) and _DIGEST.fullmatch(one.key) is None for one in keys):
            raise ConfigError(
                f"an API key that begins with {HASHED!r} is the SHA-256 of one, in 64 digits of hex, as from: "
                "printf %s KEY | sha256sum"
            )
        if len({one.digest for one in keys}) < len({(one.digest, one.name) for one in keys}):
            raise ConfigError("one API key is given under two names: whose rule would hold? Give each name its own key")
        for name in self.targets.keys:
            if all(one.name != name for one in keys):
                raise ConfigError(
                    f"the targets have a rule for a key called {name!r:.80}, but there is no such key: "
                    f"give --api-key {name:.80}=KEY, or take the rule out"
                )

    def named_keys(self) -> list[ApiKey]:
        """The keys with their names and rules."""
        found = []
        for text in self.api_keys:
            name, equals, key = text.partition("=")
            named = bool(equals) and name in self.targets.keys
            found.append(ApiKey(name, key, self.targets.keys[name]) if named else ApiKey("", text))
        return found

    def names_without_rule(self) -> list[str]:
        """What looks like the NAME of a NAME=KEY for which the given targets have no rule. Nothing that follows a name
        is told, nor what is rather the key itself: one that only ends in "=", as base64 does."""
        if self.targets == Targets():
            return []
        pairs = [text.partition("=") for text in self.api_keys]
        return [
            name
            for name, _, key in pairs
            if key.strip("=") and KEY_NAME.fullmatch(name) and name not in self.targets.keys
        ]

    def max_prompt_bytes(self, max_model_len: int) -> int:
        """Bytes of JSON that one prompt may take, for a model of ``max_model_len`` tokens."""
        return min(self.max_body_bytes, max(MIB, PROMPT_BYTES_PER_TOKEN * max_model_len))
