"""From a YAML file and `--set key=value` to a validated `ServingConfig`.

Errors name the key, the value and what is allowed; an unknown key names its nearest neighbour.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.errors import ConfigError
from configs.schema import ServingConfig


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ServingConfig:
    """Read a configuration.

    Args:
        path: YAML file, or None for the defaults alone.
        overrides: `key=value` with a dotted key and a YAML value; later ones win over earlier ones
            and over the file.

    Raises:
        ConfigError: The file cannot be read or a key or value is wrong.
    """
    tree = _read_yaml(path) if path is not None else {}
    for override in overrides:
        key, value = parse_override(override)
        _set_dotted(tree, key, value)
    return validate_config(tree)


def validate_config(tree: Mapping[str, Any]) -> ServingConfig:
    """Validate a tree of settings. Raises `ConfigError` listing every wrong key."""
    try:
        return ServingConfig.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError(_explain(exc)) from exc


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is YAML, so `4`, `true` and `text` mean what they say."""
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text!r} is not key=value, e.g. expert_pool.num_workers=2")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as exc:
        raise ConfigError(f"--set {key}: {raw!r} is not a YAML value") from exc
    if isinstance(value, str):
        value = _number_or_text(value)
    return key.strip(), value


def setting_names() -> tuple[str, ...]:
    """Every dotted key that a configuration may hold."""
    return tuple(_walk_names(ServingConfig, ""))


def _number_or_text(value: str) -> float | str:
    """YAML 1.1 reads `1e-5` as text; a user means the number."""
    try:
        return float(value)
    except ValueError:
        return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read configuration {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not valid YAML: {exc}") from exc
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}, expected a mapping of settings")
    return tree


def _set_dotted(tree: dict[str, Any], key: str, value: object) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {section!r} is a value, not a section")
        tree = child
    tree[leaf] = value


def _explain(exc: ValidationError) -> str:
    lines = []
    for error in exc.errors(include_url=False):
        key = ".".join(str(part) for part in error["loc"] if part not in _UNION_PARTS)
        if error["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, setting_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(f"{key}: unknown setting{hint}")
        elif error["type"] == "missing":
            lines.append(f"{key}: must be set")
        else:
            lines.append(f"{key}: {error['msg']}, got {error['input']!r}")
    # A union reports one line per branch; the same key and value need saying once per reason.
    return "invalid configuration: " + "; ".join(dict.fromkeys(lines))


_UNION_PARTS = frozenset({"int", "literal['auto']", "enum", "lax-or-strict", "str-enum"})


def _walk_names(model: type[BaseModel], prefix: str) -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            names.extend(_walk_names(annotation, f"{prefix}{name}."))
        else:
            names.append(f"{prefix}{name}")
    return names
