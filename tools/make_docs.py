"""Write the reference pages that follow from code: error codes, settings and metrics.

    .venv/bin/python tools/make_docs.py

A test checks that the committed pages are what this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402 - after the path is set

from cluster.api.status import STATUS_OF  # noqa: E402 - likewise
from configs.metrics import CATALOGUE  # noqa: E402 - likewise
from configs.schema import ServingConfig  # noqa: E402 - likewise


def make_pages() -> dict[str, str]:
    """Return the text of each page by its path below `docs`."""
    return {
        "consumers/errors.md": _errors_page(),
        "deployers/settings.md": _settings_page(),
        "operators/metrics.md": _metrics_page(),
    }


def _errors_page() -> str:
    lines = [
        "# Errors",
        "",
        "Every error carries `google.rpc.ErrorInfo` with domain `latentmesh` and one of these",
        "stable reasons; retryable ones also `google.rpc.RetryInfo`. The message states the value,",
        "the limit and the next step. Made by `tools/make_docs.py` from `cluster/api/status.py`.",
        "",
        "| reason | gRPC status | HTTP | retry after | meaning |",
        "|---|---|---|---|---|",
    ]
    for error, row in STATUS_OF.items():
        retry = "" if row.retry_after_s is None else f"{row.retry_after_s:g} s"
        meaning = " ".join((error.__doc__ or "").split())
        lines.append(
            f"| `{error.code}` | {row.grpc_code.name} | {row.http_status} | {retry} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def _settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "A YAML file for `latentmesh serve --config FILE`, and `--set key=value` on top of it. An",
        "unknown key is an error. Made by `tools/make_docs.py` from `configs/schema.py`.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{key}` | {default} | {text} |" for key, default, text in _walk(ServingConfig)]
    return "\n".join(lines) + "\n"


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, f"{prefix}{name}.")
            continue
        default = "(must be set)" if field.is_required() else f"`{field.default}`"
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"{prefix}{name}", default, text


def _metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        "Prometheus text at `http://<http address>/metrics`. Made by `tools/make_docs.py` from",
        "`configs/metrics.py`.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.description} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages."""
    for name, text in make_pages().items():
        path = ROOT / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
