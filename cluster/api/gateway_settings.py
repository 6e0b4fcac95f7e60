"""What one gateway is told: its settings, its workers, and the addresses that it bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.ids import GatewayId, WorkerId


@dataclass(frozen=True, slots=True)
class AttentionEndpoint:
    """Where an attention worker takes requests."""

    worker: WorkerId
    address: str
    """Its request channel, as `RequestServer.start` returned it."""


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
    trace_exporter: str = "none"
    """See `cluster.telemetry.make_tracer_provider`."""


@dataclass(frozen=True, slots=True)
class BoundAddresses:
    """Addresses that a gateway listens on, `host:port`."""

    grpc: str
    http: str
