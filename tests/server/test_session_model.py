"""Whatever happens to requests and replies, episodes go as they would undisturbed.

A real server is asked in every disorderly way: sent twice, out of order, cancelled in mid-step, killed and replaced.
Digests, observations and rewards must always be those of `DiceModel`, which knows nothing of any of that.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
from dice_model import DiceModel
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule
from sample_environments import DICE, GATE, THREADED_DICE
from serving import details, reason, request_id, serving, step

from turngym.v1 import environment_pb2 as pb
from turngym_client.messages import StatusError, Verdict
from turngym_client.stream import StepStream

ACTIONS = st.lists(st.sampled_from(["roll", "roll", "slow", "roll", "stop", "nonsense", ""]), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module", autouse=True)
def loop():
    """One event loop for every example."""
    with asyncio.Runner() as runner:
        Machine.runner = runner
        yield


@dataclass
class Played:
    """An episode as its client knows it."""

    model: DiceModel
    session_id: str
    outcome: pb.Transition
    born: pb.ResetItem | pb.ForkItem
    started: pb.Started
    server: int = 0


class Machine(RuleBasedStateMachine):
    runner: asyncio.Runner
    episodes = Bundle("episodes")

    @staticmethod
    def transport(stub):
        """What steps go through: here single calls."""
        return stub

    def __init__(self):
        super().__init__()
        GATE.set()
        self.server = 0
        self.run(self.open())

    def run(self, work):
        return self.runner.run(asyncio.wait_for(work, 20))

    async def open(self):
        self.stack = contextlib.AsyncExitStack()
        stub, _ = await self.stack.enter_async_context(serving(DICE, THREADED_DICE))
        self.stub = self.transport(stub)

    def teardown(self):
        GATE.set()
        self.run(self.stack.aclose())

    # Beginnings

    @rule(target=episodes, environment=st.sampled_from(["dice", "threaded_dice"]), level=SEEDS, noise=SEEDS)
    def reset(self, environment, level, noise):
        item = pb.ResetItem(
            request_id=request_id(),
            environment_id=environment,
            split=pb.SPLIT_ALL,
            level_seed=level,
            noise_seed=noise,
        )
        started = self.run(self.begin(item))
        model = DiceModel(environment, level, [(1, noise)])
        assert (started.level_seed, started.step_index) == (level, 0)
        self.check_state(started.state, model)
        return Played(model, started.session_id, started.state, item, started, self.server)

    async def begin(self, item):
        call, kind = (
            (self.stub.Reset, pb.ResetRequest) if isinstance(item, pb.ResetItem) else (self.stub.Fork, pb.ForkRequest)
        )
        (outcome,) = (await call(kind(items=[item]))).outcomes
        assert outcome.HasField("started"), outcome
        return outcome.started

    @rule(played=episodes)
    def begin_again(self, played):
        """The same request id and item: the same session, as it began, however far it has gone."""
        if played.server == self.server:
            assert self.run(self.begin(played.born)) == played.started

    @rule(target=episodes, played=episodes, noise=st.one_of(SEEDS, st.just("same")))
    def fork(self, played, noise):
        if played.server != self.server:
            return multiple()
        item = pb.ForkItem(
            request_id=request_id(),
            session_id=played.session_id,
            step_index=len(played.model.turns),
            **({"same_noise": True} if noise == "same" else {"noise_seed": noise}),
        )
        started = self.run(self.begin(item))
        model = DiceModel(played.model.environment, played.model.level_seed, [played.model.noise[0]])
        replay(model, played.model.turns, played.model.noise)
        if noise != "same":
            model.new_noise(noise)
        assert [(each.from_step, each.noise_seed) for each in started.noise] == model.noise
        assert started.session_id != played.session_id
        self.check_state(started.state, model)
        return Played(model, started.session_id, started.state, item, started, self.server)

    # Turns

    @rule(played=episodes, actions=ACTIONS)
    def play(self, played, actions):
        self.turn(played, actions, lambda: self.send(played, actions))

    @rule(played=episodes, actions=ACTIONS)
    def lose_the_reply(self, played, actions):
        self.turn(played, actions, lambda: self.send(played, actions), lambda: self.send(played, actions))

    @rule(played=episodes, actions=ACTIONS)
    def send_twice_at_once(self, played, actions):
        async def both():
            first, second = await asyncio.gather(self.send(played, actions), self.send(played, actions))
            assert first == second
            return first

        self.turn(played, actions, both)

    @rule(played=episodes, actions=ACTIONS)
    def cancel_in_mid_step(self, played, actions):
        """The client gives up while the turn is being played; then asks again, while it still is, and after."""

        async def cancelled():
            if played.model.environment == "threaded_dice":  # The other would hold up the event loop, this one's too.
                GATE.clear()
            call = asyncio.ensure_future(self.send(played, actions))
            await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            again = asyncio.ensure_future(self.send(played, actions))
            await asyncio.sleep(0.005)
            GATE.set()
            return await again

        self.turn(played, actions, cancelled)

    @rule(played=episodes, ahead=st.integers(-3, 3), actions=ACTIONS)
    def out_of_order(self, played, ahead, actions):
        """A step that is neither the last nor the next changes nothing."""
        model = played.model
        index = len(model.turns) + 1 + ahead
        if played.server != self.server or ahead == 0 or index < 0:
            return
        if index == len(model.turns) and index > 0:
            actions = (*model.turns[-1], "roll")
        outcome = self.run(step(self.stub, played.session_id, index, *actions))
        if model.ended and index != len(model.turns):
            assert reason(outcome) == "EPISODE_ENDED"
        else:
            assert reason(outcome) == "WRONG_STEP_INDEX"
            assert details(outcome.error)[0].metadata["expected"] == str(len(model.turns) + 1)

    @rule(first=episodes, second=episodes, actions=ACTIONS)
    def play_in_one_call(self, first, second, actions):
        if first.session_id == second.session_id or self.server not in (first.server, second.server):
            return
        items = [
            pb.StepItem(session_id=each.session_id, step_index=len(each.model.turns) + 1, actions=actions)
            for each in (first, second)
        ]
        outcomes = self.run(self.all_of(items))
        for played, outcome in zip((first, second), outcomes, strict=True):
            self.check_outcome(played, tuple(actions), outcome)

    async def all_of(self, items):
        while True:
            reply = await self.stub.Step(pb.StepRequest(items=items))
            assert [each.session_id for each in reply.outcomes] == [each.session_id for each in items]
            if not any(each.HasField("pending") for each in reply.outcomes):
                return reply.outcomes

    async def send(self, played, actions):
        return await step(self.stub, played.session_id, len(played.model.turns) + 1, *actions)

    def turn(self, played, actions, *attempts):
        for attempt in attempts[:-1]:
            self.run(attempt())
        self.check_outcome(played, tuple(actions), self.run(attempts[-1]()))

    def check_outcome(self, played, actions, outcome):
        if played.server != self.server:
            assert reason(outcome) == "SESSION_UNKNOWN"
        elif played.model.ended:
            assert reason(outcome) == "EPISODE_ENDED"
        else:
            played.model.play(actions)
            self.check_state(outcome.transition, played.model)
            played.outcome = outcome.transition
        self.resend(played)

    @rule(played=episodes)
    def resend(self, played):
        """The last turn again: the stored result, also after the end."""
        if played.server == self.server and played.model.turns:
            outcome = self.run(step(self.stub, played.session_id, len(played.model.turns), *played.model.turns[-1]))
            assert outcome.transition == played.outcome

    # Deaths

    @rule()
    def kill(self):
        """Another server, which has never heard of any session."""
        self.run(self.stack.aclose())
        self.server += 1
        self.run(self.open())

    @rule(target=episodes, played=consumes(episodes))
    def resume(self, played):
        """Replay leads to where the episode stood, on this server or another."""
        model = played.model
        item = pb.ResetItem(
            request_id=request_id(),
            environment_id=model.environment,
            split=pb.SPLIT_ALL,
            level_seed=model.level_seed,
            resume=pb.Resume(
                turns=[pb.Actions(actions=actions) for actions in model.turns],
                noise=[pb.NoiseSegment(from_step=first, noise_seed=seed) for first, seed in model.noise],
                digest=model.digest,
            ),
        )
        started = self.run(self.begin(item))
        assert started.step_index == len(model.turns)
        self.check_state(started.state, model)
        return Played(model, started.session_id, started.state, item, started, self.server)

    @rule(played=consumes(episodes))
    def close(self, played):
        reply = self.run(self.closed(played.session_id))
        assert reply.outcomes[0].closed == (played.server == self.server)
        assert reason(self.run(step(self.stub, played.session_id, 1, "roll"))) == "SESSION_UNKNOWN"

    async def closed(self, session_id):
        return await self.stub.Close(pb.CloseRequest(session_ids=[session_id]))

    @staticmethod
    def check_state(state, model):
        assert state.observation == model.observation
        assert state.reward == model.reward
        assert (state.terminated or state.truncated) == model.ended
        assert state.truncated == model.truncated
        assert state.digest == model.digest


class OverStream:
    """A stub whose steps go over one stream, mended when it breaks."""

    def __init__(self, stub):
        self._stub = stub
        self._stream = None

    def __getattr__(self, rpc):
        return getattr(self._stub, rpc)

    async def Step(self, request):
        while True:
            if self._stream is None or self._stream.broken:
                self._stream = StepStream(self._stub.StepStream())
            answered = asyncio.get_running_loop().create_future()

            def tell(answer, answered=answered):
                if not answered.done():  # It is, where whoever asked was cancelled.
                    answered.set_result(answer)

            await self._stream.send(pb.StepStreamRequest(step=request), 20, tell)
            answer = await answered
            if not isinstance(answer, StatusError):
                return answer
            if answer.verdict is not Verdict.AWAY:
                raise answer

    async def cut(self):
        if self._stream is not None:
            await self._stream.close()


class StreamMachine(Machine):
    transport = OverStream

    @rule(played=Machine.episodes, actions=ACTIONS)
    def cut_in_mid_step(self, played, actions):
        """The stream breaks while a turn is being played; what is under way goes over another."""

        async def cut():
            if played.model.environment == "threaded_dice":
                GATE.clear()
            sent = asyncio.ensure_future(self.send(played, actions))
            await asyncio.sleep(0.005)
            await self.stub.cut()
            GATE.set()
            return await sent

        self.turn(played, actions, cut)


def replay(model, turns, noise):
    segments = list(noise[1:])
    for index, actions in enumerate(turns, start=1):
        while segments and segments[0][0] == index:
            model.new_noise(segments.pop(0)[1])
        model.play(actions)
    for _, seed in segments:
        model.new_noise(seed)


Machine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
StreamMachine.TestCase.settings = Machine.TestCase.settings
TestSessions = Machine.TestCase
TestStreams = StreamMachine.TestCase
