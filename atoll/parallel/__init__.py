"""Everything that happens inside one replica of many workers; knows nothing of rounds between replicas.

`build_parallel` gives a worker its part of a model, `ParallelModel` runs it with the others, `shards` says what the
worker owns, and `refine` who averages what with whom when replicas differ in shape.
"""

from atoll.parallel.memory import activation_bytes, count_bytes, in_flight, predict_bytes
from atoll.parallel.mesh import ReplicaMesh, build_mesh
from atoll.parallel.pipeline import ParallelModel, ParallelSettings, build_parallel
from atoll.parallel.plan import SCHEDULES, StagePlan, check_batch, plan_stages
from atoll.parallel.refine import Piece, refine
from atoll.parallel.shard_files import ShardReader, export_model, make_optimizer_state_, optimizer_values, write_shards
from atoll.parallel.sharding import Shard
from atoll.parallel.skeleton import build_skeleton

__all__ = [
    "SCHEDULES",
    "ParallelModel",
    "ParallelSettings",
    "Piece",
    "ReplicaMesh",
    "Shard",
    "ShardReader",
    "StagePlan",
    "activation_bytes",
    "build_mesh",
    "build_parallel",
    "build_skeleton",
    "check_batch",
    "count_bytes",
    "export_model",
    "in_flight",
    "make_optimizer_state_",
    "optimizer_values",
    "plan_stages",
    "predict_bytes",
    "refine",
    "write_shards",
]
