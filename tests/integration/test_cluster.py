"""A whole cluster as its user runs it: Ray, Serve, workers in their own processes."""

import os
import signal
import urllib.request

import numpy as np
import pytest

from cluster.api.client import LatentmeshClient
from cluster.valkey import SERVER_NAME
from tests.fakes.served_cluster import (
    MINI,
    ServedCluster,
    generate,
    read_json,
    run_latentmesh,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

FEW_BLOCKS = ["attention_pool.num_blocks=64", "attention_pool.num_state_slots=8"]


@pytest.fixture(scope="module")
def golden():
    data = np.load(MINI / "golden.npz")
    return {name: data[name].tolist() for name in ("tokens", "greedy")}


@pytest.fixture
def serve(tmp_path):
    """Starts clusters, each with folders of its own, and ends them by force."""
    clusters = []

    def _serve(*settings, **options):
        folder = tmp_path / f"cluster{len(clusters)}"
        folder.mkdir()
        clusters.append(ServedCluster(folder, [*FEW_BLOCKS, *settings], **options))
        return clusters[-1]

    yield _serve
    for cluster in clusters:
        cluster.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One attention worker, two expert workers; shared by tests that only ask."""
    cluster = ServedCluster(tmp_path_factory.mktemp("cluster"), FEW_BLOCKS)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def record(cluster):
    return cluster.wait_ready()


def fetch(url):
    with urllib.request.urlopen(url, timeout=30) as response:
        return read_json(response.read().decode())


def test_greedy_tokens_are_the_golden_ones(record, golden):
    assert generate(record.grpc, golden["tokens"], max_tokens=64) == golden["greedy"]


def test_ready_record_describes_the_launch(cluster, record):
    assert record.pid == cluster.process.pid
    assert record.data_dir == str(cluster.data_dir)
    assert record.model == "k3"
    assert (cluster.data_dir / "ready.json").read_text() == cluster.ready_file.read_text()


def test_addresses_and_workers_are_printed(cluster, record):
    for text in (record.grpc, record.http, record.dashboard, "attention-0", "expert-1"):
        assert text in cluster.output


def test_nothing_but_our_own_lines_reaches_the_terminal(cluster, record):
    assert cluster.errors == ""
    assert "serve.py" not in cluster.output
    assert "raylet" not in cluster.output


def test_status_as_json_finds_the_cluster_by_its_data_folder(cluster, record):
    done = run_latentmesh("status", "--data-dir", str(cluster.data_dir), "--json")
    view = read_json(done.stdout)
    assert view["cluster_id"] == record.cluster_id
    assert view["server"] == record.grpc
    assert view["membership_generation"] == 1
    assert [worker["name"] for worker in view["attention_workers"]] == ["attention-0"]
    assert [worker["name"] for worker in view["expert_workers"]] == ["expert-0", "expert-1"]
    assert view["gone_workers"] == []
    assert view["config"]["serving"]["expert_pool"]["num_workers"] == 2
    assert view["attention_workers"][0]["transports"] == ["shm", "shm"]
    assert {layer["epoch"] for layer in view["layers"]} == {1}


def test_status_as_a_table_names_every_worker(record):
    done = run_latentmesh("status", "--server", record.grpc)
    assert done.returncode == 0
    for name in ("attention-0", "expert-0", "expert-1"):
        assert name in done.stdout


def test_workers_run_in_processes_of_their_own(cluster, record):
    with LatentmeshClient(record.grpc) as client:
        view = client.topology()
    pids = {worker.pid for worker in (*view.attention_workers, *view.expert_workers)}
    assert len(pids) == 3
    assert pids <= {process.pid for process in cluster.processes()}


def test_work_of_a_request_shows_in_the_workers_counts(record, golden):
    generate(record.grpc, golden["tokens"][:8], max_tokens=4)
    with LatentmeshClient(record.grpc) as client:
        view = client.topology()
    assert view.attention_workers[0].output_tokens >= 4
    assert view.attention_workers[0].latent_bytes_sent > 0
    assert sum(worker.pairs for worker in view.expert_workers) > 0
    assert view.attention_workers[0].used_blocks == 0


def test_load_tells_which_experts_had_how_much(record, golden, tmp_path):
    generate(record.grpc, golden["tokens"][:8], max_tokens=4)
    picture = tmp_path / "load.png"
    done = run_latentmesh(
        *("load", "--server", record.grpc, "--json", "--quantile", "0.5", "--quantile", "1"),
        *("--picture", str(picture), "--hottest", "3"),
    )
    view = read_json(done.stdout)
    assert (view["workers"], view["silent_workers"]) == (["attention-0"], [])
    assert view["num_buckets"] > 0
    # Every layer has the same tokens, and each of them picks equally many experts.
    assert len({round(one["mean_picks"] * view["num_buckets"]) for one in view["layers"]}) == 1
    assert all(one["peak_to_average"] > 1 for one in view["layers"])
    assert view["hottest"][0]["picks"][1] == max(max(one["picks"][1]) for one in view["layers"])
    assert {one["copies"] for one in view["hottest"]} == {1}
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = run_latentmesh("load", "--server", record.grpc).stdout
    assert "Hottest experts" in table


def test_dashboard_shows_the_serve_application(record):
    applications = fetch(f"{record.dashboard}/api/serve/applications/")["applications"]
    application = applications[f"latentmesh-{record.cluster_id}"]
    assert application["status"] == "RUNNING"
    assert list(application["deployments"]) == ["Gateway"]


def test_dashboard_shows_every_worker_with_a_speaking_name(record):
    actors = fetch(f"{record.dashboard}/api/v0/actors?limit=100")["data"]["result"]["result"]
    names = {actor["name"]: actor["class_name"] for actor in actors}
    assert names[f"{record.cluster_id}:attention-0"] == "AttentionWorkerActor"
    assert names[f"{record.cluster_id}:expert-0"] == "ExpertWorkerActor"
    assert names[f"{record.cluster_id}:expert-1"] == "ExpertWorkerActor"


def test_second_cluster_on_the_same_data_folder_is_refused(cluster, record):
    done = run_latentmesh(
        "serve", "--checkpoint", str(MINI), "--set", f"data_dir={cluster.data_dir}"
    )
    assert done.returncode == 2
    assert str(cluster.data_dir) in done.stderr
    assert str(record.pid) in done.stderr
    assert "Traceback" not in done.stderr


def test_taken_port_is_refused_before_anything_starts(record, tmp_path):
    port = record.grpc.rpartition(":")[2]
    done = run_latentmesh(
        *("serve", "--checkpoint", str(MINI)),
        *("--set", f"data_dir={tmp_path}", "--set", f"api.grpc_port={port}"),
    )
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert not (tmp_path / "state").exists()


def test_two_clusters_run_side_by_side(record, golden, serve):
    other = serve()
    other_record = other.wait_ready()
    assert other_record.cluster_id != record.cluster_id
    assert len({record.grpc, record.http, other_record.grpc, other_record.http}) == 4
    assert other_record.dashboard != record.dashboard
    expected = golden["greedy"][:8]
    assert generate(other_record.grpc, golden["tokens"], max_tokens=8) == expected
    assert generate(record.grpc, golden["tokens"], max_tokens=8) == expected
    assert other.stop() == 0
    assert generate(record.grpc, golden["tokens"], max_tokens=8) == expected


def test_dead_worker_and_dead_state_server_are_reported_and_the_cluster_stays(serve):
    cluster = serve()
    record = cluster.wait_ready()
    with LatentmeshClient(record.grpc) as client:
        pid = client.topology().expert_workers[1].pid
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for(lambda: "expert-1 is gone" in cluster.errors, "news of the dead worker")
    cluster.wait_for(lambda: "need its experts fail" in cluster.errors, "what that means")
    view = read_json(run_latentmesh("status", "--server", record.grpc, "--json").stdout)
    assert view["gone_workers"] == ["expert-1"]
    (state_server,) = (each for each in cluster.processes() if each.name() == SERVER_NAME)
    state_server.kill()
    cluster.wait_for(lambda: "state server is gone" in cluster.errors, "news of the state server")
    again = read_json(run_latentmesh("status", "--server", record.grpc, "--json").stdout)
    assert again["gone_workers"] == ["expert-1"]
    assert (again["layers"], again["membership_generation"]) == (view["layers"], 1)
    assert cluster.errors.count("state server is gone") == 1
    assert cluster.stop() == 0
    assert cluster.leftovers() == []


def test_cluster_whose_last_expert_worker_dies_ends_with_a_failure(serve):
    cluster = serve("expert_pool.num_workers=1")
    record = cluster.wait_ready()
    with LatentmeshClient(record.grpc) as client:
        pid = client.topology().expert_workers[0].pid
    os.kill(pid, signal.SIGKILL)
    assert cluster.process.wait(60) == 1
    assert "no expert worker is left" in cluster.errors
    assert cluster.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stopped_cluster_leaves_no_process_socket_or_memory_file(serve, number):
    cluster = serve()
    cluster.wait_ready()
    assert cluster.stop(number) == 0
    assert cluster.leftovers() == []


@pytest.mark.parametrize(
    "step", ["starting Ray", "loading weights"], ids=["in Ray's start", "while loading"]
)
def test_signal_while_starting_takes_everything_down(serve, step):
    cluster = serve()
    cluster.wait_for(lambda: step in cluster.log, step)
    cluster.processes()
    assert cluster.stop(signal.SIGINT) == 130
    assert cluster.leftovers() == []


def test_killed_launch_is_cleared_away_by_the_next(serve):
    cluster = serve()
    cluster.wait_for(lambda: "starting Ray" in cluster.log, "the state server")
    cluster.process.kill()
    cluster.process.wait(10)
    cluster.wait_for_end_of_all()
    assert list(cluster.temporary.iterdir()) != []
    successor = serve(f"data_dir={cluster.data_dir}")
    successor.wait_for(lambda: not list(cluster.temporary.iterdir()), "an empty run folder")
    successor.stop()
