"""One island of a simulation: trains by its script and speaks the protocol, in virtual time.

What it does is what `atoll.train.island` does, without the arithmetic: its progress is a number of tokens, its anchor
the name of a committed round. Training is a generator that yields what it waits for:

    for every item of the script:   compute   sleep that long
                                    launch    take the progress since this fragment was launched last, and offer it
                                    land      sleep until that round is committed, then for the outer step

An island that is not ready when a round closes takes part with weight 0, keeps its progress and brings it to the next
round. One that was frozen or away sees what the coordinator says, and fetches the committed state if it missed a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.elastic import messages as m
from atoll.plan.sim import tracks as kinds
from atoll.plan.sim.averaging import Averaging
from atoll.plan.sim.script import Compute, Land, Launch

if TYPE_CHECKING:
    from atoll.plan.sim.world import World

RECONNECT_S = 0.05  # before an island whose connection was closed comes back
ROUNDING = 1e-9


@dataclass
class _Offer:
    """Progress that was taken at the launch of round `launched`, and is offered to `round`.

    tokens: trained on since its fragment was launched last.
    """

    round: int
    fragment: int
    tokens: float
    launched: int


@dataclass
class _Average:
    """An attempt as this island sees it. result: the digest it leads to, once it is done."""

    go: m.Go
    data: Averaging
    result: str = ""


class Island:
    """One process that trains, in one life."""

    def __init__(self, world: World, site: int, *, number: int, founder: bool) -> None:
        self.id = f"{number:06d}"
        self.site = site
        self.alive = True
        self.round = 0 if founder else -1  # the committed round that it holds
        self.digest = "start" if founder else ""
        self.step_s = world.scenario.step_s(site) * world.slower.get(site, 1.0)
        self.trained, self.committed = 0.0, 0.0  # tokens
        self.tokens_per_s = 0.0
        self.connected = False
        self.fetching: m.Donor | None = None
        self._world = world
        self._founder = founder
        self._seat = -1
        self._unsent = [0.0] * world.script.num_fragments  # tokens that no offer holds, by fragment
        self._target = world.script.inner_steps  # steps a round
        self._steps, self._inner_s = 0, 0.0  # of the current one
        self._segment = (0.0, 0.0, 0)  # when computing began, less pauses before; seconds, steps
        self._offers: deque[_Offer] = deque()  # in no committed round yet, oldest first
        self._said: _Offer | None = None
        self._average: _Average | None = None
        self._fastest = 0.0
        self._place = -1  # in the script
        self._training: Iterator[None] | None = None
        self._until: Callable[[], bool] | None = None
        self._paused: dict[str, float] = {}  # why, and since when
        self._paused_s = 0.0
        self._paused_since = 0.0
        self._doing = ""
        self._backlog: list[Callable[[], None]] = []
        self.dial()

    # --- time

    @property
    def frozen(self) -> bool:
        return kinds.FROZEN in self._paused

    @property
    def holds_state(self) -> bool:
        return self.alive and self.round >= 0 and self.fetching is None

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """A timer of this process: it does not go off while it is frozen, nor after its death."""
        self._world.clock.after(delay_s, lambda: self.when_running(act))

    def when_running(self, act: Callable[[], None]) -> None:
        if self.alive and self.frozen:
            self._backlog.append(act)
        elif self.alive:
            act()

    def freeze(self) -> None:
        """SIGSTOP: no instruction runs, and nothing goes through its connections."""
        self._world.host.hear_beat(self)
        self._world.fabric.block(self.site, True)
        self._pause(kinds.FROZEN)

    def thaw(self) -> None:
        if not self.alive or not self.frozen:
            return
        self._world.fabric.block(self.site, False)
        self._go_on(kinds.FROZEN)
        self._world.host.hear_beat(self)
        backlog, self._backlog = self._backlog, []
        for act in backlog:
            self.when_running(act)

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        if self._doing == kinds.COMPUTE and not self._paused:
            self.trained += self._done_of_segment() * self._world.scenario.tokens_a_step
        if self.frozen:
            self._world.fabric.block(self.site, False)
        self._drop_average(lambda data: data.lose(self))
        self._world.tracks.begin(self.site, kinds.DOWN, self._world.clock.now)

    def _done_of_segment(self) -> int:
        began, seconds, steps = self._segment
        done_s = self._world.clock.now - self._paused_s - began
        return int(min(1.0, done_s / seconds) * steps) if seconds else 0

    def _pause(self, why: str) -> None:
        if not self._paused:
            self._paused_since = self._world.clock.now
        self._paused[why] = self._world.clock.now
        self._show(why)

    def _go_on(self, why: str) -> None:
        del self._paused[why]
        if self._paused:
            self._show(next(iter(self._paused)))
            return
        self._paused_s += self._world.clock.now - self._paused_since
        self._show(self._doing)
        self._poke()

    def _show(self, kind: str) -> None:
        self._world.tracks.begin(self.site, kind, self._world.clock.now)

    # --- training

    def _train(self) -> Iterator[None]:
        script = self._world.script
        while True:
            self._place += 1
            item = script[self._place]
            if isinstance(item, Compute):
                steps = int(item.scaled(self._target, script.inner_steps))
                seconds = self._world.draw_compute_s(self, steps)
                self._segment = (self._world.clock.now - self._paused_s, seconds, steps)
                yield from self._spend(kinds.COMPUTE, seconds)
                self._note_trained(steps, seconds)
            elif isinstance(item, Launch):
                self._launch(item)
            else:
                yield from self._land(item)

    def _spend(self, kind: str, seconds: float) -> Iterator[None]:
        """Do something for so long, pauses not counted."""
        self._doing = kind
        self._show(kind)
        until = self._world.clock.now + seconds
        while True:
            paused_s = self._paused_s
            yield from self._sleep(until)
            if self._paused_s == paused_s:
                return
            until += self._paused_s - paused_s

    def _sleep(self, until: float) -> Iterator[None]:
        clock = self._world.clock
        clock.at(until, self._poke)
        self._until = lambda: clock.now >= until
        yield

    def _poke(self) -> None:
        """Training goes on if what it waits for is there."""
        if self._training is not None and self.alive and not self._paused and (self._until is None or self._until()):
            self._until = None
            next(self._training)

    def _end_round(self) -> None:
        """DyLU: the next round has as many steps as this island takes while the fastest takes all of them."""
        if self._inner_s:
            self.tokens_per_s = self._steps * self._world.scenario.tokens_a_step / self._inner_s
        self._steps, self._inner_s = 0, 0.0
        if self._world.scenario.patience.adapt and self._fastest:
            steps = self._world.script.inner_steps
            share = min(1.0, self.tokens_per_s / self._fastest)
            self._target = max(1, int(steps * share + ROUNDING * steps))

    def _note_trained(self, steps: int, seconds: float) -> None:
        tokens = steps * self._world.scenario.tokens_a_step
        self.trained += tokens
        self._unsent = [unsent + tokens for unsent in self._unsent]
        self._steps, self._inner_s = self._steps + steps, self._inner_s + seconds

    def _launch(self, item: Launch) -> None:
        """Offer the progress to this round, or to the next that is open if it was committed meanwhile."""
        launched = self._offers[-1].round if self._offers else self.round
        if item.round <= max(launched, self.round):
            self._place = self._world.script.launch_of(max(launched, self.round) + 1)
            found = self._world.script[self._place]
            assert isinstance(found, Launch)
            item = found
        tokens, self._unsent[item.fragment] = self._unsent[item.fragment], 0.0
        self._offers.append(_Offer(item.round, item.fragment, tokens, item.round))
        if item.fragment == len(self._unsent) - 1:
            self._end_round()
        self._announce()

    def _land(self, item: Land) -> Iterator[None]:
        """Nothing lands of a round that this island was not in."""
        mine = next((offer for offer in self._offers if offer.launched == item.round), None)
        if mine is not None:
            self._doing = kinds.WAIT
            self._show(kinds.WAIT)
            self._until = lambda: all(offer is not mine for offer in self._offers)
            yield
        elif self.round < item.round:
            return
        landing_s = self._world.landing_s
        if landing_s:
            yield from self._spend(kinds.LAND, landing_s)

    # --- what it says

    def dial(self) -> None:
        """Come to the coordinator, for the first time or again."""
        self.connected = True
        self._said = None
        self.say(self._hello())

    def say(self, message: m.FromMember) -> None:
        if self.connected:
            self._world.host.carry_up(self, message)

    def _hello(self) -> m.Hello:
        return m.Hello(
            member=self.id,
            name=f"island {self.site}",
            version="1.0.0",
            settings_digest="simulated",
            address=self.id,
            port=1,
            pid=self.site,
            num_workers=1,
            round=self.round,
            digest=self.digest,
            founder=self._founder,
            seat=self._seat,
        )

    def _announce(self) -> None:
        """Say Ready for the oldest offer, once the round before it is held."""
        if not self._offers or self.fetching is not None or not self.connected or self._said is self._offers[0]:
            return
        offer = self._offers[0]
        if offer.round == self.round + 1:
            self._said = offer
            ready = m.Ready(offer.round, self.digest, max(offer.tokens, ROUNDING), 1.0, True, self._target)
            self.say(ready)

    def fail(self, go: m.Go, why: str) -> None:
        """The averaging of an attempt came to nothing here."""
        average = self._average
        if average is not None and average.go.attempt == go.attempt and not average.result:
            self.say(m.Failed(go.round, go.attempt, why))

    def finish_average(self, data: Averaging) -> None:
        """All bytes of an attempt are here."""
        average = self._average
        if average is None or average.data is not data or average.result:
            return
        self._world.sent_payload(self, data)
        average.result = f"{self.digest}.{data.go.attempt}"[-32:]
        sent = data.sent_bytes if data.count > 1 else 0
        self.say(m.Reached(data.go.round, data.go.attempt, average.result, payload_bytes=sent))

    # --- what it hears

    def hear(self, message: Any) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            m.Welcome: self._on_welcome,
            m.Go: self._on_go,
            m.Commit: self._on_commit,
            m.Void: self._on_void,
            m.Donor: self._on_donor,
            m.Rejected: self._on_rejected,
        }
        if type(message) in handlers:
            handlers[type(message)](message)

    def closed(self) -> None:
        """The coordinator ended the connection: come back."""
        self.connected = False
        self._drop_average(lambda data: data.lose(self))
        self.later(RECONNECT_S, self.dial)

    def _on_welcome(self, welcome: m.Welcome) -> None:
        self._seat = welcome.seat
        self._said = None
        while self._offers and self._offers[0].round <= welcome.contributed:
            self._offers.popleft()  # committed while this island was away
        if welcome.settled and welcome.current:
            self._held(welcome.round, welcome.digest)

    def _held(self, round: int, digest: str) -> None:
        """This island holds what is committed: train, and offer what there is to offer."""
        self.round, self.digest = round, digest
        self._forget_past()
        if self._training is None:
            self._place = self._world.script.launch_of(round)
            self._training = self._train()
            self._poke()
        else:
            self._announce()
            self._poke()

    def _forget_past(self) -> None:
        """What was offered to a round that was committed without it is offered to the next one, with what came since.

        Where the next one is for another fragment, it goes with the next launch of its own.
        """
        while self._offers and self._offers[0].round <= self.round:
            offer = self._offers.popleft()
            self._said = None
            if len(self._unsent) > 1:
                self._unsent[offer.fragment] += offer.tokens
            elif self._offers:
                self._offers[0].tokens += offer.tokens
            else:
                offer.round = self.round + 1
                self._offers.append(offer)

    def _on_go(self, go: m.Go) -> None:
        self._drop_average(lambda data: None)
        if go.round != self.round + 1:
            self.say(m.Failed(go.round, go.attempt, f"holds round {self.round}"))
            return
        data = self._world.averaging_of(go)
        self._average = _Average(go, data)
        if go.participants[0].member == self.id:
            self.say(m.Meet(go.attempt, self.id, 1))
        data.join(self)

    def _on_void(self, void: m.Void) -> None:
        if self._average is not None and self._average.go.attempt == void.attempt:
            self._drop_average(lambda data: data.end())

    def _drop_average(self, tell: Callable[[Averaging], None]) -> None:
        average, self._average = self._average, None
        if average is not None and not average.result:
            tell(average.data)

    def _on_commit(self, commit: m.Commit) -> None:
        average, self._average = self._average, None
        if commit.round <= self.round:
            self.say(m.Have(self.round, self.digest))
            return
        self._fastest = commit.fastest
        if average is None or average.result != commit.digest:
            self.say(m.Failed(commit.round, commit.attempt, "has no result of it"))
            return
        if self._offers and self._offers[0].round == commit.round and commit.weights.get(self._seat, 0.0) > 0:
            self._offers.popleft()
        self._held(commit.round, commit.digest)

    def _on_rejected(self, rejected: m.Rejected) -> None:
        """It crossed a commit, or came back in mid-round: offered again to the next round."""
        if self._said is not None and self._said.round == rejected.round:
            self._said = None

    def _on_donor(self, donor: m.Donor) -> None:
        source = self._world.island(donor.member)
        if source is None or not source.holds_state:
            self.say(m.Have(self.round, self.digest))
            return
        self._drop_average(lambda data: data.lose(self))
        self.fetching = donor
        self._pause(kinds.FETCH)
        self._world.transfer(source, self, (source.round, source.digest))

    def fetched(self, state: tuple[int, str] | None) -> None:
        """The state of a donor is here; None: the donor is gone."""
        if self.fetching is None:
            return
        self.fetching = None
        self._go_on(kinds.FETCH)
        if state is not None and state[0] > self.round:
            self.round, self.digest = state
        self.say(m.Have(self.round, self.digest))
        if self.round >= 0:
            self._held(self.round, self.digest)
