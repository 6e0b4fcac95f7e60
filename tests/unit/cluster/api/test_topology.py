from dataclasses import fields

import pytest

from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.topology import (
    AttentionWorkerView,
    ExpertWorkerView,
    LayerPlacementView,
    ModelView,
    TopologyView,
    from_proto,
    layer_views,
    to_proto,
)
from configs.errors import InvariantError
from configs.ids import ClusterId, Epoch, Generation, WorkerId
from router.placement import LayerPlacement, Placement


def filled(kind, **given):
    """A view whose numbers are all different and not zero."""
    values = {
        field.name: index + 1 if field.type in ("int", "float") else f"{field.name}-value"
        for index, field in enumerate(fields(kind))
    }
    return kind(**{**values, **given})


VIEW = TopologyView(
    model=filled(ModelView, has_tokenizer=True),
    attention_workers=(filled(AttentionWorkerView, transports=("shm", "tcp")),),
    expert_workers=(filled(ExpertWorkerView, busy_s=1.25), filled(ExpertWorkerView, pid=77)),
    membership_generation=Generation(4),
    layers=(LayerPlacementView(layer=3, epoch=2, holders=((0,), (1, 0))),),
    config_json='{"a": 1}',
    cluster_id=ClusterId("c"),
    version="0.1.0",
)


def test_view_survives_the_proto():
    assert from_proto(to_proto(VIEW)) == VIEW


@pytest.mark.parametrize(
    "message",
    [
        pb.GetTopologyResponse(),
        pb.ModelInfo(),
        pb.AttentionWorker(),
        pb.ExpertWorker(),
        pb.LayerPlacement(),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_no_field_of_the_proto_is_left_empty_by_a_full_view(message):
    full = to_proto(VIEW)
    parts = {
        "GetTopologyResponse": full,
        "ModelInfo": full.model,
        "AttentionWorker": full.attention_workers[0],
        "ExpertWorker": full.expert_workers[0],
        "LayerPlacement": full.layers[0],
    }
    name = message.DESCRIPTOR.name
    filled_in = {field.name for field, _ in parts[name].ListFields()}
    assert filled_in == {field.name for field in message.DESCRIPTOR.fields}


def test_layers_are_sorted_and_holders_are_indices():
    names = [WorkerId("expert-0"), WorkerId("expert-1")]
    placement = Placement(
        layers=(
            LayerPlacement(layer=5, epoch=Epoch(2), holders=((names[1],), (names[1], names[0]))),
            LayerPlacement(layer=1, epoch=Epoch(1), holders=((names[0],),)),
        )
    )
    assert layer_views(placement, names) == (
        LayerPlacementView(layer=1, epoch=1, holders=((0,),)),
        LayerPlacementView(layer=5, epoch=2, holders=((1,), (1, 0))),
    )


def test_placement_on_an_unknown_worker_is_an_invariant_error():
    holders = ((WorkerId("expert-9"),),)
    placement = Placement(layers=(LayerPlacement(layer=1, epoch=Epoch(1), holders=holders),))
    with pytest.raises(InvariantError, match="expert-9"):
        layer_views(placement, [WorkerId("expert-0")])
