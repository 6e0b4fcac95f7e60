"""What a user may write: one strict, frozen tree of settings.

Validated by pydantic; an unknown key, a wrong type or a value out of range is an error that names
the key. Nothing here is changed after loading; values that depend on the model or the machine are
`auto` and become numbers in `configs/resolve.py`. At most twelve fields per object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from configs.numerics import Combine, FloatType, Numerics

Auto = Literal["auto"]
Transport = Literal["shm", "tcp", "nccl"]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )


class ModelConfig(_Section):
    """How the model computes. Set by whoever deploys."""

    compute_dtype: FloatType = FloatType.FLOAT32
    """Type of weights and activations outside the fp32 islands (router, state, norms)."""
    mla_norm_eps: float = Field(default=1e-6, gt=0, le=1e-3)
    """Epsilon of the two norms inside MLA; the released code uses 1e-6, some engines 1e-5."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where both sides compute. `auto` takes a GPU when torch sees one."""


class SnapshotConfig(_Section):
    """What attention workers keep of what they computed, and how requests move between them."""

    memory_bytes: int | Auto = "auto"
    """State copies of one worker: for prompts that begin alike, and of preempted requests.

    0 keeps none. `auto` is as much as the state slots take.
    """
    interval_tokens: int = Field(default=2048, ge=16, le=1 << 20, multiple_of=16)
    """A long prompt leaves a reusable state at every multiple, besides the one near its end.

    In one step it leaves one at most: the last.
    """
    min_gain_tokens: int = Field(default=64, ge=1, le=1 << 20)
    """A reusable state saves at least so many tokens beyond the one before it."""
    copy_interval_tokens: int = Field(default=0, ge=0, le=1 << 20)
    """A running request is copied away from its worker after so many new tokens; 0 never.

    When a worker is lost, its requests go on from their last copy instead of from their prompts.
    """
    folder: Path | None = None
    """Folder that all attention workers share, for copies that leave their worker.

    Without it they go into the memory of another attention worker.
    """
    max_stored_bytes: int = Field(default=1 << 30, ge=1 << 16, le=1 << 44)
    """Copies of others in one worker's memory, or of all in `folder`; the oldest go first."""
    transfer_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """A copy that takes longer to send or fetch is given up; its tokens are computed again."""


class AttentionPoolConfig(_Section):
    """Attention workers: requests, caches, sampling."""

    num_workers: int = Field(default=1, ge=1, le=1024)
    """Attention workers to start."""
    devices_per_worker: int = Field(default=1, ge=1, le=1)
    """Devices that share one worker's heads. Only 1 is built."""
    num_threads: int | Auto = "auto"
    """CPU threads per worker for matrix products; `auto` shares the cores among all workers."""
    memory_bytes: int | Auto = "auto"
    """Memory of one worker for weights, blocks and slots; `auto` shares the machine's."""
    block_tokens: int = Field(default=64, ge=16, le=4096, multiple_of=16)
    """Tokens in one block of the MLA cache."""
    num_blocks: int | Auto = "auto"
    """Blocks of the MLA cache; `auto` fits memory."""
    num_state_slots: int = Field(default=64, ge=1, le=4096)
    """Requests that can run at once: one KDA + conv state each."""
    max_step_tokens: int = Field(default=512, ge=16, le=65536)
    """Tokens computed in one step: decode first, then prefill chunks up to this sum."""
    max_queued_requests: int = Field(default=1024, ge=0, le=1_000_000)
    """Requests that may wait for a slot before new ones are refused."""
    context_tokens: int | Auto = "auto"
    """Longest prompt plus answer; `auto` is the model's own limit, cut to what memory holds."""
    snapshots: SnapshotConfig = SnapshotConfig()


class ExpertPoolConfig(_Section):
    """Expert workers: expert slots and their FFN."""

    num_workers: int = Field(default=2, ge=1, le=4096)
    """Expert workers to start."""
    num_threads: int | Auto = "auto"
    """CPU threads per worker; `auto` shares the cores among all workers."""
    memory_bytes: int | Auto = "auto"
    """Memory of one worker for expert slots; `auto` shares the machine's."""
    merge_window_s: float = Field(default=0.0, ge=0, le=1)
    """How long a frame may wait for frames of the same layer from other attention workers, seconds.

    0 merges what is already there and never waits.
    """


class RouterConfig(_Section):
    """The data plane between the pools."""

    transport: Literal["auto", "shm", "tcp", "nccl"] = "auto"
    """`auto` probes: shared memory where two workers really share it, else TCP."""
    wire_dtype: FloatType = FloatType.FLOAT32
    """Type of latents and answers on the wire."""
    combine: Auto | Combine = "auto"
    """`canonical`: one answer per pair; `presum`: one partial sum per token and worker."""
    dispatch_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """A dispatch without an answer fails after this many seconds."""
    connect_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Connecting a pair of workers fails after this many seconds."""
    shm_bytes: int = Field(default=8 << 20, ge=1 << 16, le=1 << 34)
    """Shared memory per direction of a pair; a larger frame goes over the socket instead."""
    spin_s: float = Field(default=0.0002, ge=0, le=0.1)
    """A waiting reader polls this long before it sleeps in the kernel, seconds."""
    load_window_steps: int = Field(default=128, ge=0, le=4096)
    """Steps whose picks per layer and expert each attention worker keeps; 0 counts nothing."""


class AuthConfig(_Section):
    """Who may call, and how much. `latentmesh keys` makes keys."""

    keys: Literal["auto", "required", "off"] = "auto"
    """`required`: a request without a valid API key is refused. `auto` is `required` with a
    `key_file`, or where `host` is not loopback and neither `tls.client_ca` nor `insecure` is set.
    """
    key_file: Path | None = None
    """File of keys, reread when it changes; without it keys lie in the state store."""
    cache_s: float = Field(default=5.0, ge=0, le=300)
    """A key that was looked up is trusted this long, so a revocation may take as long, seconds."""
    requests_per_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    """Limit of callers whose key sets none; without it they have none."""
    max_concurrent_requests: int | None = Field(default=None, ge=1, le=100_000)
    """Limit of callers whose key sets none; without it they have none."""


class TlsConfig(_Section):
    """Encryption of both ports: TLS 1.2 or newer."""

    certificate: Path | None = None
    """PEM file: the server's certificate, then those between it and its root."""
    private_key: Path | None = None
    """PEM file: the key of `certificate`, without a passphrase."""
    client_ca: Path | None = None
    """PEM file: clients must show a certificate signed by one of these (mTLS)."""


class ConnectionConfig(_Section):
    """How long connections last and how slow a client may be."""

    max_age_s: float = Field(default=1800.0, ge=0.1, le=86400)
    """A gRPC connection this old is asked to reconnect (give or take 10 %), seconds."""
    age_grace_s: float = Field(default=3600.0, ge=0.1, le=86400)
    """What still runs on it may go on this long, seconds."""
    max_streams: int = Field(default=256, ge=1, le=65536)
    """Calls at once on one gRPC connection; further ones wait at the client."""
    max_header_bytes: int = Field(default=16 << 10, ge=4 << 10, le=1 << 20)
    """Largest metadata of a gRPC call, and largest head of an HTTP request."""
    receive_timeout_s: float = Field(default=30.0, ge=0.1, le=3600)
    """TLS handshake, head and body of an HTTP request may each take this long, seconds."""
    keep_alive_s: float = Field(default=75.0, ge=1, le=3600)
    """An idle HTTP connection is closed after this long, seconds."""


class ApiConfig(_Section):
    """The front door."""

    host: str = "127.0.0.1"
    """Address that both servers bind."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 takes any free one, which is reported."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """HTTP port for OpenAI's API, health and metrics; 0 takes any free one, which is reported."""
    model_name: str = Field(default="k3", min_length=1, max_length=128)
    """Name that clients may put into `model`."""
    max_message_bytes: int = Field(default=64 << 20, ge=1 << 16, le=1 << 30)
    """Largest gRPC message and largest HTTP body accepted."""
    max_running_requests: int = Field(default=256, ge=1, le=100_000)
    """Requests in one gateway before new ones are refused with RESOURCE_EXHAUSTED."""
    drain_timeout_s: float = Field(default=10.0, ge=0, le=3600)
    """On shutdown running requests get this long to finish, seconds."""
    move_timeout_s: float = Field(default=10.0, ge=0, le=3600)
    """A request whose worker drained or was lost may wait this long for another one, seconds."""
    auth: AuthConfig = AuthConfig()
    tls: TlsConfig = TlsConfig()
    connections: ConnectionConfig = ConnectionConfig()
    insecure: bool = False
    """Serve on an address that others reach without known callers or without TLS."""


class StateConfig(_Section):
    """Where durable state lives."""

    url: str = Field(default="embedded", pattern=r"^(embedded|rediss?://.+|unix://.+)$")
    """`embedded` starts a Valkey under the data folder; else a Redis URL."""


class RayConfig(_Section):
    """The Ray cluster underneath."""

    address: str = "local"
    """`local` starts a private cluster; else the address of a running one, or `auto`."""
    object_store_bytes: int = Field(default=80 << 20, ge=75 << 20)
    """Object store of a private cluster. Tokens and latents never pass through it."""
    dashboard: bool = True
    """Start the Ray dashboard of a private cluster."""
    dashboard_port: int = Field(default=0, ge=0, le=65535)
    """Port of that dashboard; 0 takes any free one, which is reported."""


class ObservabilityConfig(_Section):
    """What operators see. Metrics are always served on the HTTP port."""

    trace_exporter: str = Field(default="none", min_length=1)
    """`none`, or an installed OpenTelemetry exporter, e.g. `console`, `otlp_proto_grpc`.

    The exporter reads its own `OTEL_*` variables (endpoint, headers).
    """


class ServingConfig(_Section):
    """A whole cluster, as written by its user."""

    checkpoint: Path
    """Folder of a checkpoint in the released K3 layout."""
    data_dir: Path = Path("latentmesh-data")
    """Folder for state, logs and sockets; locked against a second cluster."""
    numerics: Numerics = Numerics.FAST
    """`invariant` promises bit-identical logits of a request whatever else runs."""
    model: ModelConfig = ModelConfig()
    attention_pool: AttentionPoolConfig = AttentionPoolConfig()
    expert_pool: ExpertPoolConfig = ExpertPoolConfig()
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()
    state: StateConfig = StateConfig()
    ray: RayConfig = RayConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
