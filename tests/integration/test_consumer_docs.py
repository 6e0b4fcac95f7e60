"""Every code block of docs/consumers runs as it stands there, on the cluster that they start."""

import socket
from pathlib import Path

import pytest

from tests.fakes.doc_blocks import BlockRunner, read_blocks

ROOT = Path(__file__).parent.parent.parent
CONSUMERS = ROOT / "docs" / "consumers"
QUICK_START = CONSUMERS / "quickstart.md"
PAGES = sorted(page for page in CONSUMERS.glob("*.md") if any(b.is_run for b in read_blocks(page)))
PORTS = ("50051", "8000", "30000")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A folder that looks like a checkout, and the replacements."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("proto", "examples", "configs", "cluster", "actors", "model", "router"):
        (folder / name).symlink_to(ROOT / name)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    replacements = {f":{port}": f":{own}" for port, own in ports.items()}
    replacements |= {f"port={port}": f"port={own}" for port, own in ports.items()}
    replacements |= {f"port {port}": f"port {own}" for port, own in ports.items()}
    replacements |= {"/tmp/k3-small": str(folder / "k3-small")}
    return folder, replacements


@pytest.fixture(scope="module")
def cluster(house):
    """The cluster of the quick start: its blocks until the server is up."""
    runner = BlockRunner(*house)
    try:
        for block in read_blocks(QUICK_START):
            runner.run(block)
            if block.ready_url is not None:
                break
        yield
    finally:
        runner.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_page_runs(page, house, cluster):
    blocks = [block for block in read_blocks(page) if block.is_run]
    if page == QUICK_START:
        names = [block.ready_url is not None for block in blocks]
        blocks = blocks[names.index(True) + 1 :]
    runner = BlockRunner(*house)
    try:
        for block in blocks:
            runner.run(block)
    finally:
        runner.close()


def test_there_are_pages_to_run():
    assert QUICK_START in PAGES
