"""Environment variables: ours are defaults, the user's win."""

import pytest

from configs.environment import (
    prepare_for_attached_ray,
    prepare_for_private_ray,
    temporary_folder,
    use_temporary_folder,
)
from configs.errors import ConfigError


def test_private_ray_has_no_token_and_reports_nothing():
    variables = {}
    prepare_for_private_ray(variables)
    assert variables == {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def test_what_the_user_has_set_stays():
    variables = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "1"}
    prepare_for_private_ray(variables)
    assert variables == {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "1"}


def test_unknown_authentication_mode_is_an_error():
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE is 'maybe'"):
        prepare_for_private_ray({"RAY_AUTH_MODE": "maybe"})


def test_attaching_leaves_authentication_to_the_user():
    variables = {}
    prepare_for_attached_ray(variables)
    assert "RAY_AUTH_MODE" not in variables


def test_temporary_folder_exists():
    assert temporary_folder().is_dir()


def test_children_are_given_the_temporary_folder(tmp_path):
    variables = {"TMPDIR": "/elsewhere"}
    use_temporary_folder(tmp_path, variables)
    assert variables == {"TMPDIR": str(tmp_path)}
