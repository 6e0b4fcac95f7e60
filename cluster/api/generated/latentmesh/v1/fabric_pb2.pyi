from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadQuantilesRequest(_message.Message):
    __slots__ = ("quantiles", "layers", "num_hottest", "summary_only")
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOTTEST_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_ONLY_FIELD_NUMBER: _ClassVar[int]
    quantiles: _containers.RepeatedScalarFieldContainer[float]
    layers: _containers.RepeatedScalarFieldContainer[int]
    num_hottest: int
    summary_only: bool
    def __init__(self, quantiles: _Optional[_Iterable[float]] = ..., layers: _Optional[_Iterable[int]] = ..., num_hottest: _Optional[int] = ..., summary_only: _Optional[bool] = ...) -> None: ...

class GetLoadQuantilesResponse(_message.Message):
    __slots__ = ("quantiles", "num_buckets", "bucket_s", "span_s", "workers", "silent_workers", "layers", "hottest")
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    NUM_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_S_FIELD_NUMBER: _ClassVar[int]
    SPAN_S_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SILENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_FIELD_NUMBER: _ClassVar[int]
    quantiles: _containers.RepeatedScalarFieldContainer[float]
    num_buckets: int
    bucket_s: float
    span_s: float
    workers: _containers.RepeatedScalarFieldContainer[str]
    silent_workers: _containers.RepeatedScalarFieldContainer[str]
    layers: _containers.RepeatedCompositeFieldContainer[LayerLoad]
    hottest: _containers.RepeatedCompositeFieldContainer[HotExpert]
    def __init__(self, quantiles: _Optional[_Iterable[float]] = ..., num_buckets: _Optional[int] = ..., bucket_s: _Optional[float] = ..., span_s: _Optional[float] = ..., workers: _Optional[_Iterable[str]] = ..., silent_workers: _Optional[_Iterable[str]] = ..., layers: _Optional[_Iterable[_Union[LayerLoad, _Mapping]]] = ..., hottest: _Optional[_Iterable[_Union[HotExpert, _Mapping]]] = ...) -> None: ...

class LayerLoad(_message.Message):
    __slots__ = ("layer", "mean_picks", "peak_to_average", "quantiles")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    MEAN_PICKS_FIELD_NUMBER: _ClassVar[int]
    PEAK_TO_AVERAGE_FIELD_NUMBER: _ClassVar[int]
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    mean_picks: float
    peak_to_average: float
    quantiles: _containers.RepeatedCompositeFieldContainer[ExpertLoads]
    def __init__(self, layer: _Optional[int] = ..., mean_picks: _Optional[float] = ..., peak_to_average: _Optional[float] = ..., quantiles: _Optional[_Iterable[_Union[ExpertLoads, _Mapping]]] = ...) -> None: ...

class ExpertLoads(_message.Message):
    __slots__ = ("picks",)
    PICKS_FIELD_NUMBER: _ClassVar[int]
    picks: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, picks: _Optional[_Iterable[float]] = ...) -> None: ...

class HotExpert(_message.Message):
    __slots__ = ("layer", "expert", "picks", "mean_picks", "share")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    PICKS_FIELD_NUMBER: _ClassVar[int]
    MEAN_PICKS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert: int
    picks: _containers.RepeatedScalarFieldContainer[float]
    mean_picks: float
    share: float
    def __init__(self, layer: _Optional[int] = ..., expert: _Optional[int] = ..., picks: _Optional[_Iterable[float]] = ..., mean_picks: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...
