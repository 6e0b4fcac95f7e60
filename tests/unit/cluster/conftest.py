"""A server and folders for the tests of the cluster's parts."""

import shutil
import tempfile
from pathlib import Path

import pytest

from cluster.valkey import EmbeddedValkey


@pytest.fixture
def short_folder():
    """A folder whose path leaves room for socket names; pytest's own are too long."""
    path = Path(tempfile.mkdtemp(prefix="lmt-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def state_server(tmp_path_factory):
    """A running embedded server, shared by tests that use their own cluster ids."""
    sockets = Path(tempfile.mkdtemp(prefix="lmt-"))
    folder = tmp_path_factory.mktemp("state")
    server = EmbeddedValkey.start(
        folder=folder, socket=sockets / "v.sock", log_file=folder / "valkey.log"
    )
    yield server
    server.stop()
    shutil.rmtree(sockets)
