import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choices")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choices: Choices
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "max_tokens", "sampling", "stop_token_ids", "ignore_eos", "resume_offset", "stop", "include_stop_text", "min_tokens", "num_choices", "constraint", "logprobs", "prompt_logprobs", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    RESUME_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    resume_offset: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_text: bool
    min_tokens: int
    num_choices: int
    constraint: Constraint
    logprobs: int
    prompt_logprobs: int
    priority: int
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., resume_offset: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_text: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., num_choices: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunk", "finished")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    finished: Finished
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("token_ids", "text", "choice", "logprobs", "prompt_logprobs", "prompt_position")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_POSITION_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    choice: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_position: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., choice: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_position: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "usage", "seed", "request_id", "choice", "stop_token_id", "stop_text")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    request_id: str
    choice: int
    stop_token_id: int
    stop_text: str
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ..., choice: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., stop_text: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "computed_tokens", "output_tokens", "queue_time", "time_to_first_token", "total_time")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    queue_time: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    def __init__(self, prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("first_position", "num_rows", "vocab_size", "logits")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    num_rows: int
    vocab_size: int
    logits: bytes
    def __init__(self, first_position: _Optional[int] = ..., num_rows: _Optional[int] = ..., vocab_size: _Optional[int] = ..., logits: _Optional[bytes] = ...) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_snapshots",)
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    num_snapshots: int
    def __init__(self, num_snapshots: _Optional[int] = ...) -> None: ...

class GetTopologyResponse(_message.Message):
    __slots__ = ("model", "attention_workers", "expert_workers", "membership_generation", "layers", "config_json", "cluster_id", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WORKERS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    attention_workers: _containers.RepeatedCompositeFieldContainer[AttentionWorker]
    expert_workers: _containers.RepeatedCompositeFieldContainer[ExpertWorker]
    membership_generation: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlacement]
    config_json: str
    cluster_id: str
    version: str
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ..., attention_workers: _Optional[_Iterable[_Union[AttentionWorker, _Mapping]]] = ..., expert_workers: _Optional[_Iterable[_Union[ExpertWorker, _Mapping]]] = ..., membership_generation: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPlacement, _Mapping]]] = ..., config_json: _Optional[str] = ..., cluster_id: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "context_tokens", "vocab_size", "has_tokenizer", "num_layers", "num_experts", "num_experts_per_token", "hidden_size", "latent_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    LATENT_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_tokens: int
    vocab_size: int
    has_tokenizer: bool
    num_layers: int
    num_experts: int
    num_experts_per_token: int
    hidden_size: int
    latent_size: int
    def __init__(self, name: _Optional[str] = ..., context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., num_experts_per_token: _Optional[int] = ..., hidden_size: _Optional[int] = ..., latent_size: _Optional[int] = ...) -> None: ...

class AttentionWorker(_message.Message):
    __slots__ = ("name", "pid", "node_id", "running_requests", "queued_requests", "used_blocks", "total_blocks", "used_slots", "total_slots", "prompt_tokens", "output_tokens", "latent_bytes_sent", "wire_bytes_sent", "wire_bytes_received", "latents_sent", "memory_bytes", "transports", "cached_blocks", "prefix_snapshots", "snapshot_bytes", "prefix_hits", "prefix_hit_tokens", "preemptions", "restores", "recomputed_tokens", "moved_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATENT_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LATENTS_SENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    node_id: str
    running_requests: int
    queued_requests: int
    used_blocks: int
    total_blocks: int
    used_slots: int
    total_slots: int
    prompt_tokens: int
    output_tokens: int
    latent_bytes_sent: int
    wire_bytes_sent: int
    wire_bytes_received: int
    latents_sent: int
    memory_bytes: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    cached_blocks: int
    prefix_snapshots: int
    snapshot_bytes: int
    prefix_hits: int
    prefix_hit_tokens: int
    preemptions: int
    restores: int
    recomputed_tokens: int
    moved_requests: int
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., node_id: _Optional[str] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., used_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., used_slots: _Optional[int] = ..., total_slots: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., latent_bytes_sent: _Optional[int] = ..., wire_bytes_sent: _Optional[int] = ..., wire_bytes_received: _Optional[int] = ..., latents_sent: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., cached_blocks: _Optional[int] = ..., prefix_snapshots: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., restores: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., moved_requests: _Optional[int] = ...) -> None: ...

class ExpertWorker(_message.Message):
    __slots__ = ("name", "pid", "node_id", "num_expert_slots", "weight_bytes", "pairs", "weight_reads", "frames", "busy_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_READS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    BUSY_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    node_id: str
    num_expert_slots: int
    weight_bytes: int
    pairs: int
    weight_reads: int
    frames: int
    busy_time: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., node_id: _Optional[str] = ..., num_expert_slots: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., pairs: _Optional[int] = ..., weight_reads: _Optional[int] = ..., frames: _Optional[int] = ..., busy_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LayerPlacement(_message.Message):
    __slots__ = ("layer", "epoch", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    epoch: int
    experts: _containers.RepeatedCompositeFieldContainer[ExpertHolders]
    def __init__(self, layer: _Optional[int] = ..., epoch: _Optional[int] = ..., experts: _Optional[_Iterable[_Union[ExpertHolders, _Mapping]]] = ...) -> None: ...

class ExpertHolders(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, workers: _Optional[_Iterable[int]] = ...) -> None: ...
