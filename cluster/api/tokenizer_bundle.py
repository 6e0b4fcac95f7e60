"""The archive from which a client builds the model's tokenizer, and what `config.json` says of it.

The same files give the same bytes, so that the fingerprints of several gateways agree.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from configs.errors import CheckpointError
from model.dims_reading import CONFIG_FILE as MODEL_CONFIG_FILE
from model.tokenizer import CONFIG_FILE, RANKS_FILE

_OPTIONAL_FILES: Final = (
    MODEL_CONFIG_FILE,
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
ARCHITECTURES: Final = ("KimiK3ForConditionalGeneration",)
MODEL_TYPE: Final = "kimi_k3"


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """Tokenizer files as one archive."""

    data: bytes
    """A zip; file names without folders."""
    sha256: str
    """Of `data`, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """How a model's `config.json` names it. The defaults are the released model's."""

    model_type: str = MODEL_TYPE
    architectures: tuple[str, ...] = ARCHITECTURES
    bos_token_id: int = 0
    pad_token_id: int = 0


def build_tokenizer_bundle(folder: Path) -> TokenizerBundle:
    """Pack the tokenizer files of a folder. Blocks; not for the event loop.

    Clients recognise the model by `config.json`: a minimal one takes the place of a missing one.

    Raises:
        CheckpointError: A file cannot be read.
    """
    contents: dict[str, bytes] = {}
    try:
        for name in (RANKS_FILE, CONFIG_FILE):
            contents[name] = (folder / name).read_bytes()
        for name in _OPTIONAL_FILES:
            if (folder / name).is_file():
                contents[name] = (folder / name).read_bytes()
    except OSError as exc:
        raise CheckpointError(
            f"the tokenizer files of {folder.name} cannot be read: {exc.strerror}"
        ) from exc
    minimal = {"architectures": list(ARCHITECTURES), "model_type": MODEL_TYPE}
    contents.setdefault(MODEL_CONFIG_FILE, json.dumps(minimal).encode())
    data = _pack(contents)
    return TokenizerBundle(data=data, sha256=hashlib.sha256(data).hexdigest())


def read_model_names(folder: Path) -> ModelNames:
    """Read how `config.json` of a folder names its model. Blocks; not for the event loop.

    Raises:
        CheckpointError: The file is there and cannot be read.
    """
    file = folder / MODEL_CONFIG_FILE
    if not file.is_file():
        return ModelNames()
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise CheckpointError(
            f"{MODEL_CONFIG_FILE} of {folder.name} cannot be read: {exc}"
        ) from exc
    names = config if isinstance(config, dict) else {}
    architectures = names.get("architectures")
    return ModelNames(
        model_type=str(names.get("model_type", MODEL_TYPE)),
        architectures=tuple(map(str, architectures))
        if isinstance(architectures, list)
        else ARCHITECTURES,
        bos_token_id=_token_id(names, "bos_token_id"),
        pad_token_id=_token_id(names, "pad_token_id"),
    )


def _token_id(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _pack(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(
                zipfile.ZipInfo(name, date_time=_ZIP_EPOCH),
                contents[name],
                compress_type=zipfile.ZIP_DEFLATED,
            )
    return buffer.getvalue()
