"""M replicas of one process under a schedule, trained by hand: what the laws are checked with.

    fleet = Fleet(num_replicas=2, settings=OuterSettings(), schedule=Schedule(4))
    fleet.run(12)
    fleet.finish()

A `Move` stands for an inner optimizer. `sign_move` depends on the parameters, the replica and the step, and all it does
is a multiple of 1/64: fp32 adds such numbers without rounding, in any order, so that laws hold bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.algo.adopt import ADOPT_RULES
from atoll.algo.outer import OUTER_OPTIMIZERS, SGD
from atoll.algo.schedule import Event, Launch, Schedule
from atoll.comm.local import LocalGroup
from atoll.compress import Compressor, build_compressor
from atoll.exchange import Exchange, Mean, State, mean_sent_bytes
from atoll.train.sync import OuterSettings, ReplicaSync, RoundReport

Params = dict[str, Tensor]
Move = Callable[[int, int, Params], None]

SCHEDULES = {
    "diloco": Schedule(4),
    "every step": Schedule(1),
    "streaming": Schedule(4, num_fragments=2),
    "streaming, delay 1": Schedule(4, num_fragments=2, delay=1),
    "streaming, delay 5 of 6": Schedule(6, num_fragments=3, delay=5),
    "short delay": Schedule(3, delay=2),
    "one-round delay": Schedule(3, delay=3),
    "one-round delay, first blocks": Schedule(3, delay=3, blocking_first=True),
    "streaming, one-round delay, first blocks": Schedule(4, num_fragments=2, delay=4, blocking_first=True),
    "begins at step 2": Schedule(3, delay=3, first_step=2),
}
RULES = {name: make(0.5, 0.5) for name, make in ADOPT_RULES.items()}
OPTIMIZERS = {name: make(0.5, 0.1) for name, make in OUTER_OPTIMIZERS.items()}


def start_params() -> Params:
    """Three fragments' worth of awkward shapes."""
    return {
        "scalar": torch.tensor(1.0),
        "one": torch.tensor([2.0]),
        "vector": torch.arange(3.0) - 1,
        "cube": torch.arange(8.0).view(2, 2, 2) / 4,
        "turned": (torch.arange(6.0).view(2, 3) / 2).t(),
        "empty": torch.empty(0, 3),
    }


FRAGMENT_NAMES = {
    2: [["scalar", "cube"], ["one", "vector", "turned", "empty"]],
    3: [["scalar", "one"], ["vector", "empty", "cube"], ["turned"]],
}


def sign_move(replica: int, step: int, params: Params) -> None:
    """A step of 1/4 towards 1/8, and noise of this replica and step, in multiples of 1/64."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    for param in params.values():
        noise = torch.randint(-32, 33, param.shape, generator=generator) / 64
        param += 0.25 * torch.sign(0.125 - param) + noise


def pull_move(replica: int, step: int, params: Params) -> None:
    """A step of SGD on a parabola with its minimum at 1 + replica: rounds, as real training does."""
    for param in params.values():
        param += 0.2 * (1.0 + replica - param)


@dataclass
class Member:
    params: Params
    sync: ReplicaSync


@dataclass
class Fleet:
    """All replicas of a run. how: what a replica passes to `launch`, by replica and step."""

    num_replicas: int
    settings: OuterSettings = field(default_factory=OuterSettings)
    schedule: Schedule = field(default_factory=lambda: Schedule(4))
    move: Move = sign_move
    start: Callable[[], Params] = start_params
    fragments: Sequence[Sequence[str]] | None = None
    how: Callable[[int, int], Mapping[str, Any]] = lambda replica, step: {}

    def __post_init__(self) -> None:
        self.step = 0
        self.reports: list[list[RoundReport]] = []
        alone = [list(self.start())]
        self.names = self.fragments or (FRAGMENT_NAMES[n] if (n := self.schedule.num_fragments) > 1 else alone)
        self.members = []
        for end in LocalGroup(self.num_replicas).endpoints():
            params = self.start()
            self.members.append(Member(params, ReplicaSync(params, end, self.settings, fragments=self.names)))

    def run(self, steps: int) -> Fleet:
        """Train `steps` more steps."""
        for _ in range(steps):
            self.step += 1
            for replica, member in enumerate(self.members):
                self.move(replica, self.step, member.params)
            self.do(self.schedule.events(self.step))
        return self

    def finish(self) -> Fleet:
        """What ends a run."""
        self.do(self.schedule.finish(self.step))
        return self

    def do(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Launch):
                for replica, member in enumerate(self.members):
                    member.sync.launch(event.fragment, **self.how(replica, self.step))
            else:
                self.reports.append([member.sync.apply(event.fragment, step=self.step) for member in self.members])

    def save(self) -> dict[str, Any]:
        """Everything a checkpoint holds, as it is now."""
        members = [
            {
                "params": m.params,
                "anchor": m.sync.anchor(),
                "shared": m.sync.shared_state(),
                "own": m.sync.replica_state(),
            }
            for m in self.members
        ]
        return copy.deepcopy({"step": self.step, "members": members})

    def load(self, saved: Mapping[str, Any]) -> Fleet:
        """Go on from `save`."""
        self.step = saved["step"]
        for member, item in zip(self.members, saved["members"], strict=True):
            member.sync.load_shared_state(item["anchor"], item["shared"])
            for name, param in member.params.items():
                param.copy_(item["params"][name])
            member.sync.load_replica_state(item["own"])
        return self

    def anchor(self, replica: int = 0) -> Params:
        return self.members[replica].sync.anchor()


def settings_for(schedule: Schedule, **changes: Any) -> OuterSettings:
    """Outer settings that fit `schedule`; buckets of 5 elements, so that there are several and tensors are cut."""
    return OuterSettings(**{"keep_contribution": schedule.delay > 0, "bucket_elements": 5, **changes})


def plain_averaging(schedule: Schedule, **changes: Any) -> OuterSettings:
    """A unit outer step: SGD with rate 1."""
    return settings_for(schedule, **{"optimizer": SGD(), "lr": lambda step: 1.0, **changes})


def trained_alone(move: Move, steps: int, start: Callable[[], Params] = start_params) -> Params:
    """Replica 0 with no outer loop."""
    params = start()
    for step in range(1, steps + 1):
        move(0, step, params)
    return params


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert set(left) == set(right)
    for name in left:
        assert left[name].shape == right[name].shape and bits(left[name]) == bits(right[name]), name


def assert_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Equal numbers: 0 and −0 are one."""
    assert set(left) == set(right)
    for name in left:
        assert torch.equal(left[name], right[name]), f"{name}: {left[name]} is not {right[name]}"


@dataclass(frozen=True)
class Feedback:
    """Rounds to halves and owes the rest. Stands for compressors with state that look at whole tensors."""

    elementwise = False
    needs_feedback = False

    def init(self, shape: Sequence[int]) -> State:
        return {"own.residual": torch.zeros(tuple(shape))}

    def average(self, tensor: Tensor, state: State, *, owed: Tensor | None = None) -> Exchange:
        assert owed is None
        total = tensor + state["own.residual"]
        coarse = (total * 2).round() / 2
        mean = yield Mean(coarse)
        return mean, {"own.residual": total - coarse}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return 4 * math.prod(shape)

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        return mean_sent_bytes(math.prod(shape), 4, num_replicas=num_replicas, replica=replica)


# those whose numbers can be told by hand: short ones travel exactly. The others have laws of their own.
COMPRESSORS: dict[str, Compressor] = {
    **{name: build_compressor(name) for name in ("identity", "bf16", "fp16")},
    "feedback": Feedback(),
}


__all__ = [
    "COMPRESSORS", "OPTIMIZERS", "RULES", "SCHEDULES", "Feedback", "Fleet", "assert_equal", "assert_same_bits", "bits",
    "plain_averaging", "pull_move", "settings_for", "sign_move", "start_params", "trained_alone",
]  # fmt: skip
