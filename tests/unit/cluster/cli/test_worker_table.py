"""The table of workers."""

import io

from cluster.api.topology import (
    AttentionWorkerView,
    ExpertWorkerView,
    ModelView,
    TopologyView,
)
from cluster.cli.status import describe
from cluster.cli.worker_table import make_console, make_worker_table
from configs.ids import ClusterId, Generation, WorkerId


def view(*, expert_pid=2):
    return TopologyView(
        model=ModelView("k3", 1, 2, False, 3, 4, 5, 6, 7),
        attention_workers=(
            AttentionWorkerView(
                WorkerId("attention-0"), 1, "n", output_tokens=12345, transports=("shm", "tcp")
            ),
        ),
        expert_workers=(
            ExpertWorkerView(WorkerId("expert-0"), expert_pid, "n", pairs=30, weight_reads=10),
        ),
        membership_generation=Generation(4),
        layers=(),
        config_json='{"a": 1}',
        cluster_id=ClusterId("c"),
        version="1",
    )


def text_of(view):
    stream = io.StringIO()
    make_console(stream).print(make_worker_table(view))
    return stream.getvalue()


def test_table_shows_work_and_tokens_per_weight_read():
    text = text_of(view())
    assert "generation 4" in text
    assert "12,345 tokens" in text
    assert "shm/tcp" in text
    assert "3.00 per weight read" in text


def test_worker_that_cannot_be_asked_is_shown_as_gone():
    assert "gone" in text_of(view(expert_pid=0))


def test_json_names_gone_workers_and_holds_the_configuration_as_an_object():
    tree = describe(view(expert_pid=0), "h:1")
    assert tree["gone_workers"] == ["expert-0"]
    assert tree["config"] == {"a": 1}
    assert tree["server"] == "h:1"
