"""`latentmesh serve`: one cluster in the foreground, until Ctrl-C."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status

from cluster.cli.connection import connect
from cluster.cli.stop_signals import StopSignals
from cluster.cli.terminal import Terminal, own_terminal
from cluster.cli.worker_table import make_worker_table
from cluster.data_folder import DataFolder
from cluster.facts import gather_facts
from cluster.launch import Launch, LaunchOrder
from cluster.ready_record import ReadyRecord
from cluster.stop_request import StopRequest
from configs.errors import ServingError
from configs.ids import WorkerId
from configs.loading import load_config
from configs.resolve import resolve
from configs.schema import ServingConfig
from model.checkpoint import Checkpoint
from model.tokenizer import CONFIG_FILE, RANKS_FILE

EXIT_INTERRUPTED = 130

_logger = logging.getLogger(__name__)


def serve(
    *,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; repeatable."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Short for --set checkpoint=DIR.")
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", help="Write the addresses here once requests are served."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Bind an address that others reach without keys or TLS (api.insecure=true).",
        ),
    ] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C, which finishes running requests; twice ends them."""
    # From here on a signal stops us in good order, whatever has been started by then.
    stop = StopRequest()
    with StopSignals(stop) as signals:
        serving = load_config(config, _overrides(settings, checkpoint, insecure=insecure))
        order = _order(serving, ready_file)
        data_folder = DataFolder.lock(serving.data_dir)
        try:
            with own_terminal(data_folder.log_folder / "serve.log") as terminal:
                has_served = _run(order, data_folder, stop, signals, terminal)
        finally:
            data_folder.unlock()
    if not has_served:
        raise typer.Exit(EXIT_INTERRUPTED)


def _overrides(
    settings: Sequence[str] | None, checkpoint: Path | None, *, insecure: bool
) -> list[str]:
    overrides = [] if settings is None else list(settings)
    if insecure:
        overrides.append("api.insecure=true")
    if checkpoint is not None:
        overrides.append(f"checkpoint={checkpoint}")
    return overrides


def _order(serving: ServingConfig, ready_file: Path | None) -> LaunchOrder:
    """Check the checkpoint and fix every `auto`, before anything is started."""
    checkpoint = Checkpoint.open(serving.checkpoint, mla_norm_eps=serving.model.mla_norm_eps)
    resolved = resolve(serving, gather_facts(serving, checkpoint))
    has_tokenizer = all((serving.checkpoint / name).is_file() for name in (RANKS_FILE, CONFIG_FILE))
    return LaunchOrder(
        resolved=resolved,
        dims=checkpoint.dims,
        tokenizer_folder=serving.checkpoint.absolute() if has_tokenizer else None,
        ready_file=ready_file,
    )


def _run(
    order: LaunchOrder,
    data_folder: DataFolder,
    stop: StopRequest,
    signals: StopSignals,
    terminal: Terminal,
) -> bool:
    """Run a launch in its own thread, so that this one is free to take signals."""
    for note in order.resolved.notes:
        _logger.info("resolved %s", note)
    drain_timeout_s = order.resolved.serving.api.drain_timeout_s
    reporter = _TerminalReporter(
        terminal,
        stop,
        drain_timeout_s=drain_timeout_s,
        is_encrypted=order.resolved.serving.api.tls.certificate is not None,
        needs_key=order.resolved.access.needs_key,
    )
    launch = Launch(order, data_folder=data_folder, stop=stop, reporter=reporter)
    results: list[bool] = []
    errors: list[BaseException] = []

    def _launch() -> None:
        try:
            results.append(launch.run())
        except BaseException as exc:  # noqa: BLE001 - raised again by the main thread
            errors.append(exc)

    thread = threading.Thread(target=_launch, name="launch")
    thread.start()
    signals.wait_for(thread)
    reporter.stopped()
    if errors:
        _logger.error("the launch failed", exc_info=errors[0])
        raise errors[0]
    return results[0]


class _TerminalReporter:
    """Shows a launch on the terminal: a moving line while something goes on, then facts."""

    def __init__(
        self,
        terminal: Terminal,
        stop: StopRequest,
        *,
        drain_timeout_s: float,
        is_encrypted: bool,
        needs_key: bool,
    ) -> None:
        self._terminal = terminal
        self._stop = stop
        self._is_encrypted = is_encrypted
        self._needs_key = needs_key
        self._drain_timeout_s = drain_timeout_s
        self._status: Status | None = None

    def step(self, text: str) -> None:
        """Show what goes on: a moving line, or plain ones where nobody watches."""
        if not self._terminal.out.is_terminal:
            self._terminal.out.print(text, markup=False)
            return
        if self._status is None:
            self._status = self._terminal.out.status(text)
            self._status.start()
        self._status.update(text)

    def ready(self, record: ReadyRecord) -> None:
        """Print the addresses, then the workers."""
        self.close()
        out = self._terminal.out
        out.print(f"[bold]{record.model}[/bold] is served by cluster {record.cluster_id}")
        out.print(f"  gRPC           {record.grpc}")
        scheme = "https" if self._is_encrypted else "http"
        out.print(f"  HTTP           {scheme}://{record.http}")
        if record.dashboard is not None:
            out.print(f"  Ray dashboard  {record.dashboard}")
        out.print(f"  data folder    {record.data_dir}")
        self._show_workers(record)
        out.print("Ctrl-C finishes running requests and stops; twice stops at once.")

    def _show_workers(self, record: ReadyRecord) -> None:
        if self._is_encrypted or self._needs_key:
            # The launch has no key and no certificate of a client.
            shown = "LATENTMESH_API_KEY, LATENTMESH_CA: docs/deployers/security.md"
            self._terminal.out.print(
                f"  workers        latentmesh status --server {record.grpc} ({shown})"
            )
            return
        try:
            with connect(record.grpc) as client:
                self._terminal.out.print(make_worker_table(client.topology()))
        except ServingError as exc:
            # Requests are served; only the table is missing.
            self._terminal.errors.print(f"no worker table: {exc}", markup=False)

    def worker_gone(self, worker: WorkerId, reason: str) -> None:
        """Say which worker is gone; the log has Ray's whole explanation."""
        first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        self._terminal.errors.print(f"worker {worker} is gone: {first[:200]}", markup=False)
        requests = (
            "its requests go on at the other attention workers"
            if worker.startswith("attention")
            else "requests that need its experts fail"
        )
        self._terminal.errors.print(
            f"{requests}; start the cluster again to replace it", markup=False
        )

    def state_server_gone(self, reason: str) -> None:
        """Say that the cluster goes on without its state server, and how to mend it."""
        self._terminal.errors.print(f"the state server is gone: {reason}", markup=False)
        self._terminal.errors.print(
            "requests are still served; start the cluster again to replace it", markup=False
        )

    def stopping(self) -> None:
        """Say that it ends, and how long running requests may hold it."""
        drain_s = self._drain_timeout_s
        self.step(
            f"stopping; running requests get {drain_s:g} s to finish (Ctrl-C again does not wait)"
            if self._stop.is_asked
            else "taking down what was started"
        )

    def stopped(self) -> None:
        """Say that nothing is left."""
        self.close()
        self._terminal.out.print("stopped")

    def close(self) -> None:
        """Take the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None
