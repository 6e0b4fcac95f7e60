"""The state store, against the real embedded server."""

import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.state_store import (
    ClusterRecord,
    FencingToken,
    StateStore,
    WorkerRecord,
    server_name,
)
from configs.errors import ConfigError, StateStoreError
from configs.ids import ClusterId, Epoch, Generation, WorkerId
from router.membership import ExpertWorkerInfo, Membership
from router.placement import LayerPlacement, plan_initial_placement


def new_cluster() -> ClusterId:
    return ClusterId(uuid.uuid4().hex[:8])


@pytest.fixture
def store(state_server):
    store = StateStore.connect(state_server.url, new_cluster())
    yield store
    store.close()


@pytest.fixture
def token(store):
    return store.acquire_token()


def worker(name, role="expert"):
    return WorkerRecord(
        worker=WorkerId(name),
        role=role,
        actor=f"c:{name}",
        node_id="n",
        pid=7,
        addresses=("tcp:127.0.0.1:1",),
    )


def test_cluster_record_is_read_back(store, token):
    record = ClusterRecord(cluster=ClusterId("c"), version="1", config_json='{"a": "\\u00e9"}')
    store.write_cluster(record, token=token)
    assert store.read_cluster() == record


def test_membership_is_read_back(store, token):
    membership = Membership(
        generation=Generation(3),
        expert_workers=(
            ExpertWorkerInfo(
                worker=WorkerId("expert-0"), addresses=("shm:/x", "tcp:h:1"), host_token="t"
            ),
        ),
    )
    store.write_membership(membership, token=token)
    assert store.read_membership() == membership


def test_placement_is_read_back_by_layer(store, token):
    placement = plan_initial_placement(
        moe_layers=range(1, 13), num_experts=5, workers=[WorkerId("a"), WorkerId("b")]
    )
    store.write_layers(placement.layers[::-1], token=token)
    assert store.read_placement() == placement


def test_writing_one_layer_keeps_the_others(store, token):
    placement = plan_initial_placement(
        moe_layers=[1, 2], num_experts=2, workers=[WorkerId("a"), WorkerId("b")]
    )
    store.write_layers(placement.layers, token=token)
    moved = LayerPlacement(layer=2, epoch=Epoch(2), holders=((WorkerId("a"),), (WorkerId("a"),)))
    store.write_layers([moved], token=token)
    assert store.read_placement().layers == (placement.layers[0], moved)


def test_workers_are_ordered_by_role_and_number(store, token):
    names = ["expert-10", "expert-9", "expert-0"]
    store.write_workers([worker(name) for name in names], token=token)
    store.write_workers([worker("attention-0", role="attention")], token=token)
    assert [record.worker for record in store.read_workers()] == [
        "attention-0",
        "expert-0",
        "expert-9",
        "expert-10",
    ]


def test_removed_worker_is_gone(store, token):
    store.write_workers([worker("expert-0")], token=token)
    store.remove_worker(WorkerId("expert-0"), token=token)
    assert store.read_workers() == ()


def test_each_acquired_token_is_higher(store):
    assert [store.acquire_token() for _ in range(3)] == [1, 2, 3]


def test_acquired_token_is_above_one_seen_elsewhere(store):
    assert store.acquire_token(at_least=FencingToken(41)) == 42


def test_write_with_a_lower_token_is_refused_and_changes_nothing(store):
    old = store.acquire_token()
    new = store.acquire_token()
    store.write_workers([worker("expert-0")], token=new)
    with pytest.raises(StateStoreError, match=f"token {old} is below {new}"):
        store.remove_worker(WorkerId("expert-0"), token=old)
    assert len(store.read_workers()) == 1


def test_acquiring_alone_fences_the_writer_before(store):
    old = store.acquire_token()
    store.acquire_token()
    with pytest.raises(StateStoreError, match="refused"):
        store.write_workers([worker("expert-0")], token=old)


def test_removed_cluster_keeps_late_writers_out(store):
    old = store.acquire_token()
    new = store.acquire_token()
    store.write_workers([worker("expert-0")], token=new)
    store.remove_cluster(token=new)
    assert store.read_workers() == ()
    with pytest.raises(StateStoreError, match="refused"):
        store.write_workers([worker("expert-0")], token=old)


@settings(max_examples=30, deadline=None)
@given(tokens=st.lists(st.integers(0, 5), max_size=12))
def test_a_write_is_kept_exactly_when_no_higher_token_was_seen(state_server, tokens):
    store = StateStore.connect(state_server.url, new_cluster())
    highest = 0
    kept = None
    for index, token in enumerate(tokens):
        record = ClusterRecord(cluster=ClusterId("c"), version=str(index), config_json="{}")
        if token < highest:
            with pytest.raises(StateStoreError):
                store.write_cluster(record, token=FencingToken(token))
        else:
            store.write_cluster(record, token=FencingToken(token))
            highest, kept = token, record
    if kept is not None:
        assert store.read_cluster() == kept
    store.close()


def test_two_clusters_in_one_server_do_not_see_each_other(state_server, store, token):
    other = StateStore.connect(state_server.url, new_cluster())
    store.write_workers([worker("expert-0")], token=token)
    assert other.read_workers() == ()
    other.close()


def test_missing_record_is_an_error_that_names_it(store):
    with pytest.raises(StateStoreError, match="holds no membership"):
        store.read_membership()


def test_record_of_another_version_is_an_error(store):
    store._client.set(store._key("membership"), '{"generation": "x"}')
    with pytest.raises(StateStoreError, match="not written by this version"):
        store.read_membership()


def test_unreachable_server_is_named_without_its_password():
    with pytest.raises(StateStoreError) as caught:
        StateStore.connect("redis://user:hunter2@127.0.0.1:1/0", new_cluster())
    assert "127.0.0.1:1" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_unreadable_url_is_a_config_error_without_its_password():
    with pytest.raises(ConfigError) as caught:
        StateStore.connect("http://user:hunter2@host:1/0", new_cluster())
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:6379/0", "h:6379"),
        ("rediss://u:p@h", "h"),
        ("unix:///tmp/x.sock", "/tmp/x.sock"),
        ("redis://h:port", "(unreadable)"),
    ],
)
def test_server_name_is_what_may_be_logged(url, expected):
    assert server_name(url) == expected


def test_dead_clusters_are_forgotten_and_the_own_one_kept(tmp_path, short_folder):
    from cluster.valkey import EmbeddedValkey

    server = EmbeddedValkey.start(
        folder=tmp_path, socket=short_folder / "v.sock", log_file=tmp_path / "log"
    )
    try:
        dead = StateStore.connect(server.url, new_cluster())
        dead.write_workers([worker("expert-0")], token=dead.acquire_token())
        own = StateStore.connect(server.url, new_cluster())
        own.write_workers([worker("expert-0")], token=own.acquire_token())
        assert own.forget_other_clusters() == 2
        assert dead.read_workers() == ()
        assert len(own.read_workers()) == 1
        dead.close()
        own.close()
    finally:
        server.stop()
