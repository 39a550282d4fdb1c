import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_HEALTHY: _ClassVar[ReplicaState]
    REPLICA_STATE_SUSPECT: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_DEAD: _ClassVar[ReplicaState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_HEALTHY: ReplicaState
REPLICA_STATE_SUSPECT: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_DEAD: ReplicaState

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("run", "status")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    run: str
    status: RunStatus
    def __init__(self, run: _Optional[str] = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("role", "replicas")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    role: str
    replicas: int
    def __init__(self, role: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: PoolStatus
    def __init__(self, pool: _Optional[_Union[PoolStatus, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("replay",)
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    replay: int
    def __init__(self, replay: _Optional[int] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ("time", "event", "fields_json")
    TIME_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    event: str
    fields_json: str
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., event: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("stage", "arm", "step", "steps", "kl", "accuracy", "version", "tokens_per_second", "phase", "phase_seconds", "seconds_left", "message", "paused", "pools", "done", "error", "reward", "measure")
    class PhaseSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    arm: str
    step: int
    steps: int
    kl: float
    accuracy: float
    version: int
    tokens_per_second: float
    phase: str
    phase_seconds: _containers.ScalarMap[str, float]
    seconds_left: float
    message: str
    paused: bool
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    done: bool
    error: str
    reward: float
    measure: str
    def __init__(self, stage: _Optional[str] = ..., arm: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., kl: _Optional[float] = ..., accuracy: _Optional[float] = ..., version: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., phase: _Optional[str] = ..., phase_seconds: _Optional[_Mapping[str, float]] = ..., seconds_left: _Optional[float] = ..., message: _Optional[str] = ..., paused: _Optional[bool] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., done: _Optional[bool] = ..., error: _Optional[str] = ..., reward: _Optional[float] = ..., measure: _Optional[str] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("role", "target", "waiting", "replicas", "requests", "failures", "retries", "restarts", "engine_deaths")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DEATHS_FIELD_NUMBER: _ClassVar[int]
    role: str
    target: int
    waiting: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    requests: int
    failures: int
    retries: int
    restarts: int
    engine_deaths: int
    def __init__(self, role: _Optional[str] = ..., target: _Optional[int] = ..., waiting: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., requests: _Optional[int] = ..., failures: _Optional[int] = ..., retries: _Optional[int] = ..., restarts: _Optional[int] = ..., engine_deaths: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "state", "host", "pid", "ongoing", "version", "memory_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ONGOING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ReplicaState
    host: str
    pid: int
    ongoing: int
    version: int
    memory_bytes: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., ongoing: _Optional[int] = ..., version: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...
