"""Rank and round length of a run as the controller decides them, and the same decisions computed again from its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atoll.algo.adaptive import Controller, Course, Decision, Observation
from atoll.algo.schedule import Phase, Schedule
from atoll.errors import ConfigError
from atoll.train.config import TrainConfig


def make_controller(config: TrainConfig) -> Controller:
    """The controller that `config` describes."""
    return Controller(
        first_rank=config.rank,
        first_inner_steps=config.inner_steps,
        window=config.adaptive_window,
        floor=config.adaptive_floor,
        max_fall=config.adaptive_max_fall,
        energy=config.adaptive_energy,
    )


@dataclass
class Adapting:
    """The controller of a run with all it remembers.

    flying: decisions of the rounds in flight, the oldest first. unused: what rounds were like that have landed and have
    led to no decision yet; None where nobody counted.
    """

    controller: Controller
    course: Course
    flying: list[Decision]
    unused: list[Observation | None]

    @classmethod
    def begin(cls, config: TrainConfig) -> Adapting:
        """Before the first round."""
        controller = make_controller(config)
        return cls(controller, Course(controller.first), [], [])

    def launch(self) -> None:
        """The round that runs is launched."""
        self.flying.append(self.course.decision)

    def land(self, seen: Observation | None) -> Decision:
        """The oldest round in flight lands, and was like `seen`; returns what was decided of it."""
        self.unused.append(seen)
        return self.flying.pop(0)

    def next_round(self, schedule: Schedule, step: int) -> Schedule:
        """`schedule` with the round that begins after step `step`, decided by all that landed up to two rounds before.

        Where rounds land at once one has landed that is left for the next decision; where they land late, none.
        """
        if schedule.round_of(step) > 1:
            self.course = self.course.after(self.unused.pop(0), self.controller)
        return schedule.continue_with(step, self.course.decision.inner_steps)

    def state_dict(self, schedule: Schedule) -> dict[str, Any]:
        """Plain JSON, with the rounds that `schedule` has had and has."""
        phases = [*schedule.earlier, Phase(schedule.first_step, schedule.inner_steps)]
        return {
            "decision": asdict(self.course.decision),
            "recent": [asdict(seen) for seen in self.course.recent],
            "flying": [asdict(decision) for decision in self.flying],
            "unused": [None if seen is None else asdict(seen) for seen in self.unused],
            "phases": [list(phase) for phase in phases],
        }

    def load_state_dict(self, state: Mapping[str, Any], schedule: Schedule) -> Schedule:
        """Go on where `state` was taken; returns the schedule of then, from that at the beginning."""
        recent = tuple(Observation(**seen) for seen in state["recent"])
        self.course = Course(Decision(**state["decision"]), recent)
        self.flying = [Decision(**decision) for decision in state["flying"]]
        self.unused = [None if seen is None else Observation(**seen) for seen in state["unused"]]
        for first_step, inner_steps in state["phases"][1:]:
            schedule = schedule.continue_with(first_step, inner_steps)
        return schedule


def logged_rounds(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The round events of a log that adapted, in order."""
    return [event for event in events if event["event"] == "round" and event.get("inner_steps") is not None]


def replay(config: TrainConfig, events: Iterable[Mapping[str, Any]]) -> list[Decision]:
    """The decision of every round in a log, computed again from what the rounds before it were like.

    Raises ConfigError at the first that differs from what the log says was done.
    """
    rounds = logged_rounds(events)
    history = [None if event["observed"] is None else Observation(**event["observed"]) for event in rounds]
    decisions = make_controller(config).replay(history)[: len(rounds)]
    for number, (event, decision) in enumerate(zip(rounds, decisions, strict=True), start=1):
        done = (event["rank"], event["inner_steps"])
        if done != (decision.rank, decision.inner_steps):
            raise ConfigError(
                f"round {number} had rank={done[0]} and inner_steps={done[1]}; the log leads to {decision.rank} and "
                f"{decision.inner_steps}.\nGive the settings and the whole metrics.jsonl of one run."
            )
    return decisions
