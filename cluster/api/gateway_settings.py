"""What one gateway is told: its settings, its workers, and the addresses that it bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from configs.ids import GatewayId, WorkerId


@dataclass(frozen=True, slots=True)
class AttentionEndpoint:
    """Where an attention worker takes requests."""

    worker: WorkerId
    address: str
    """Its request channel, as `RequestServer.start` returned it."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may call, and how much; see `configs.access`."""

    needs_key: bool = False
    """Every request carries an API key."""
    key_file: Path | None = None
    """Where keys are; None looks them up in the state store."""
    state_url: str | None = field(default=None, repr=False)
    """The state store that all gateways share. None, for tests, counts in this gateway alone."""
    cache_s: float = 5.0
    """A key that was looked up is trusted this long."""
    requests_per_minute: int | None = None
    """Limit of callers whose key sets none."""
    max_concurrent_requests: int | None = None
    """Limit of callers whose key sets none."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files of both servers' TLS."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None
    """Clients must show a certificate signed by one of these."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How long connections last and how slow a client may be; as `ConnectionConfig`."""

    max_age_s: float = 1800.0
    age_grace_s: float = 3600.0
    max_streams: int = 256
    max_header_bytes: int = 16 << 10
    receive_timeout_s: float = 30.0
    keep_alive_s: float = 75.0


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway; from `ApiConfig` and the checkpoint."""

    gateway: GatewayId
    host: str
    grpc_port: int
    """0 takes any free port, see `Gateway.bound`."""
    http_port: int
    """0 takes any free port, see `Gateway.bound`."""
    model_name: str
    max_message_bytes: int
    max_running_requests: int
    """Requests in this gateway before new ones are refused with `OverloadedError`."""
    drain_timeout_s: float
    vocab_size: int
    context_tokens: int
    """Tokens of prompt and answer together."""
    eos_token_ids: tuple[int, ...]
    tokenizer_folder: Path | None
    """Folder with tokenizer files; None serves token ids only."""
    move_timeout_s: float = 10.0
    """A request whose worker drained or was lost may wait this long for another; 0 not at all."""
    trace_exporter: str = "none"
    """See `cluster.telemetry.make_tracer_provider`."""
    access: AccessSettings = AccessSettings()
    tls: TlsSettings | None = None
    connections: ConnectionSettings = ConnectionSettings()


@dataclass(frozen=True, slots=True)
class BoundAddresses:
    """Addresses that a gateway listens on, `host:port`."""

    grpc: str
    http: str
