"""The client against a server that keeps the contract but fails when told to."""

import asyncio
import gc

import pytest
from google.rpc import code_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_client import (
    CloseReason,
    EnvironmentFailed,
    EpisodeEnded,
    EpisodeLost,
    EpisodeRequest,
    InvalidRequest,
    NotServed,
    ProtocolError,
    ServerBusy,
    ServerUnavailable,
    StepOrderError,
    UnknownEnvironment,
    VersionMismatch,
    aconnect,
)


def status(code, reason="", **more):
    """A failure as the toy server is told it."""
    return {"code": code, "reason": reason, **more}


UNAVAILABLE = status(code_pb2.UNAVAILABLE)
LATE = status(code_pb2.DEADLINE_EXCEEDED)
BUSY = status(code_pb2.RESOURCE_EXHAUSTED, "SESSION_LIMIT", retry_after=0.01)


@pytest.fixture
async def client(toy):
    async with aconnect(toy.address, patience=5.0) as client:
        yield client


async def test_an_episode_from_start_to_close(toy, client):
    episode = await client.reset("toy", level_seed=7)
    assert episode.state.observation == "(7, [])"
    assert (await episode.step("a")).observation == "(7, [('a',)])"
    assert (await episode.step(["b", "c"])).observation == "(7, [('a',), ('b', 'c')])"
    assert episode.turns == (("a",), ("b", "c"))
    assert (episode.step_index, episode.level_seed, episode.done) == (2, 7, False)
    assert (await episode.advise()).ceiling == 0.5
    assert await episode.keep_alive() == 60
    await episode.close()
    await episode.close()
    assert toy.service.sessions == {}
    assert toy.service.count("Close") == 1
    assert len(toy.service.client_ids) == 1
    with pytest.raises(EpisodeEnded, match="closed"):
        await episode.step("d")


async def test_every_call_has_a_deadline(toy):
    async with aconnect(toy.address, deadline=20.0) as client:
        await client.environments()
        await client.environment("toy")
        episode = await client.reset("toy", level_seed=1)
        await episode.step("a")
        await episode.advise()
        await episode.keep_alive()
        await (await episode.fork()).close()
    bounds = dict.fromkeys(pb.DESCRIPTOR.services_by_name["EnvironmentService"].methods_by_name, 20.0)
    bounds |= {"GetServer": 5.0, "Close": 5.0}
    # A stream has none; that of its requests is seen in `test_a_deadline_in_mid_step_loses_nothing`.
    for rpc in ("StepStream", "Step") if toy.service.offers_stream else ("StepStream",):
        del bounds[rpc]
    assert toy.service.deadlines.keys() == bounds.keys()
    # On the wire a deadline is rounded up to three digits or so.
    assert all(0 < toy.service.deadlines[rpc] <= 1.05 * bound for rpc, bound in bounds.items())


@pytest.mark.parametrize("failure", [UNAVAILABLE, LATE])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_step_is_played_once(toy, client, failure, when):
    episode = await client.reset("toy", level_seed=1)
    (toy.fail_before if when == "before" else toy.fail_after)("Step", failure, failure)
    assert (await episode.step("a")).observation == "(1, [('a',)])"
    assert (toy.service.count("Step"), toy.service.played) == (3, 1)
    assert toy.service.count("Reset") == 1


@pytest.mark.parametrize("rpc", ["Reset", "Fork"])
async def test_a_lost_reset_or_fork_makes_one_session(toy, client, rpc):
    toy.fail_after(rpc, UNAVAILABLE, LATE)
    episode = await client.reset("toy", level_seed=1)
    await episode.step("a")
    copy = await episode.fork()
    assert len(toy.service.sessions) == 2
    assert toy.service.count(rpc) == 3
    assert (await copy.step("b")).observation == "(1, [('a',), ('b',)])"
    assert (await episode.step("c")).observation == "(1, [('a',), ('c',)])"
    assert copy.turns == (("a",), ("b",))


async def test_pending_is_collected(toy, client):
    episode = await client.reset("toy", level_seed=1)
    toy.service.pending = 3
    assert (await episode.step("a")).observation == "(1, [('a',)])"
    assert (toy.service.count("Step"), toy.service.played) == (4, 1)


async def test_full_is_tried_again_only_with_retry_info(toy, client):
    toy.fail_before("Reset", BUSY, BUSY)
    await client.reset("toy", level_seed=1)
    assert toy.service.count("Reset") == 3
    toy.fail_before("Reset", status(code_pb2.RESOURCE_EXHAUSTED))
    with pytest.raises(InvalidRequest):
        await client.reset("toy", level_seed=1)
    assert toy.service.count("Reset") == 4


async def test_patience_ends(toy):
    async with aconnect(toy.address, patience=0.3) as client:
        await client.server()
        toy.fail_before("Reset", *[BUSY] * 100)
        with pytest.raises(ServerBusy, match=r"gave up after 0\.3 s"):
            await client.reset("toy", level_seed=1)
        toy.fail_before("Reset", *[UNAVAILABLE] * 100)
        with pytest.raises(ServerUnavailable, match="UNAVAILABLE"):
            await client.reset("toy", level_seed=1)


async def test_nobody_there():
    async with aconnect("127.0.0.1:1", patience=0.2) as client:
        with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
            await client.server()


@pytest.mark.parametrize("gone", ["SESSION_EXPIRED", "SESSION_UNKNOWN"])
async def test_a_session_that_is_gone_is_played_again(toy, client, gone):
    episode = await client.reset("toy", level_seed=1)
    await episode.step("a")
    await episode.step("b")
    toy.fail_items("Step", status(code_pb2.NOT_FOUND, gone))
    assert (await episode.step("c")).observation == "(1, [('a',), ('b',), ('c',)])"
    assert toy.service.count("Reset") == 2


async def test_sessions_that_always_go_end_with_patience(toy):
    async with aconnect(toy.address, patience=0.5) as client:
        episode = await client.reset("toy", level_seed=1)
        toy.fail_items("Step", *[status(code_pb2.NOT_FOUND, "SESSION_EXPIRED")] * 1_000)
        with pytest.raises(ServerUnavailable, match="NOT_FOUND"):
            await episode.step("a")
        assert toy.service.count("Reset") < 20


async def test_an_episode_closed_in_mid_step_is_not_made_again(toy, client):
    episode = await client.reset("toy", level_seed=1)
    toy.fail_items("Step", status(code_pb2.NOT_FOUND, "SESSION_UNKNOWN"))
    toy.service.step_gate = asyncio.Event()
    step = asyncio.ensure_future(episode.step("a"))
    await asyncio.sleep(0.1)
    await episode.close()
    toy.service.step_gate.set()
    with pytest.raises(EpisodeEnded, match="closed"):
        await step
    assert toy.service.count("Reset") == 1


async def test_a_server_that_comes_back_empty(toy, client):
    episode = await client.reset("toy", level_seed=1)
    await episode.step("a")
    await toy.stop()
    step = asyncio.ensure_future(episode.step("b"))
    await asyncio.sleep(0.3)
    assert not step.done()
    await toy.start(remember=False)
    assert (await step).observation == "(1, [('a',), ('b',)])"
    await toy.stop()
    await toy.start(remember=False)
    copy = await episode.fork()
    assert copy.state.observation == "(1, [('a',), ('b',)])"
    await toy.stop()
    await toy.start(remember=False)
    assert (await episode.advise()).actions == ("x",)


async def test_an_episode_moves_to_another_address(toys):
    first, second = await toys(), await toys()
    async with aconnect([first.address, second.address], patience=5.0, failover=0.2) as client:
        episodes = await client.reset_many([EpisodeRequest(environment_id="toy", level_seed=seed) for seed in range(6)])
        assert [len(toy.service.sessions) for toy in (first, second)] == [3, 3]
        await client.step_many([(episode, "a") for episode in episodes])
        await first.stop()
        states = await client.step_many([(episode, "b") for episode in episodes])
        assert [state.observation for state in states] == [f"({seed}, [('a',), ('b',)])" for seed in range(6)]
        assert len(second.service.sessions) == 6
        # A new session is not sent to the address that is away.
        await client.reset("toy", level_seed=9)
        assert len(second.service.sessions) == 7
        await first.start()


async def test_a_draining_server_is_left_at_once(toys):
    first, second = await toys(), await toys()
    async with aconnect([first.address, second.address], failover=1_000.0, patience=5.0) as client:
        episode = await client.reset("toy", level_seed=1)
        home, other = (first, second) if first.service.sessions else (second, first)
        home.fail_items("Step", status(code_pb2.UNAVAILABLE, "DRAINING"))
        assert (await episode.step("a")).observation == "(1, [('a',)])"
        assert len(other.service.sessions) == 1


async def test_workers_behind_an_address_are_used(toys):
    front, worker = await toys(), await toys()
    front.service.workers = [worker.address]
    async with aconnect(front.address) as client:
        await client.reset("toy", level_seed=1)
    assert (len(front.service.sessions), len(worker.service.sessions)) == (0, 1)


async def test_a_front_that_comes_back_with_other_workers(toys):
    front, old, new = await toys(), await toys(), await toys()
    front.service.workers = [f"0.0.0.0:{old.port}"]
    async with aconnect(front.address, failover=0.1, patience=5.0) as client:
        episode = await client.reset("toy", level_seed=1)
        assert len(old.service.sessions) == 1
        await old.stop()
        front.service.workers = [new.address]
        assert (await episode.step("a")).observation == "(1, [('a',)])"
        assert len(new.service.sessions) == 1
        await old.start()


@pytest.mark.parametrize("reason", ["VERSION_MISMATCH", "NOT_REPLAYABLE", "DIGEST_MISMATCH"])
async def test_an_episode_that_cannot_be_played_again_is_lost_by_name(toy, client, reason):
    episode = await client.reset("toy", level_seed=42)
    await episode.step("a")
    toy.fail_items("Step", status(code_pb2.NOT_FOUND, "SESSION_UNKNOWN"))
    toy.fail_items("Reset", status(code_pb2.FAILED_PRECONDITION, reason))
    with pytest.raises(EpisodeLost, match=r"toy 1, .*level seed 42, noise seed 9 .*1 turns played.*" + reason) as lost:
        await episode.step("b")
    assert lost.value.reason == reason
    with pytest.raises(EpisodeLost):
        await episode.step("b")


async def test_an_episode_is_offered_to_every_address_before_it_is_lost(toys):
    first, second = await toys(), await toys()
    async with aconnect([first.address, second.address]) as client:
        episode = await client.reset("toy", level_seed=1)
        first.service.sessions.clear()
        first.fail_items("Reset", status(code_pb2.FAILED_PRECONDITION, "VERSION_MISMATCH"))
        assert (await episode.step("a")).observation == "(1, [('a',)])"
        assert (first.service.count("Reset"), second.service.count("Reset")) == (2, 1)


@pytest.mark.parametrize("reason", ["NOT_REPLAYABLE", "VERSION_MISMATCH"])
async def test_an_episode_goes_back_to_a_server_that_was_late_rather_than_be_lost(toys, reason):
    first, second = await toys(), await toys()
    async with aconnect([first.address, second.address], failover=0.0, patience=10.0) as client:
        episode = await client.reset("toy", level_seed=1)
        home, other = (first, second) if first.service.sessions else (second, first)
        home.fail_before("Step", *[status(code_pb2.DEADLINE_EXCEEDED)] * 2)
        other.fail_items("Reset", *[status(code_pb2.FAILED_PRECONDITION, reason)] * 2)
        assert (await episode.step("a")).observation == "(1, [('a',)])"
        assert (home.service.count("Reset"), other.service.count("Reset"), home.service.played) == (1, 2, 1)


async def test_an_episode_is_lost_where_its_server_has_lost_it_after_all(toys):
    first, second = await toys(), await toys()
    async with aconnect([first.address, second.address], failover=0.0, patience=10.0) as client:
        episode = await client.reset("toy", level_seed=1)
        home, other = (first, second) if first.service.sessions else (second, first)
        home.fail_before("Step", status(code_pb2.DEADLINE_EXCEEDED))
        home.fail_items("Step", status(code_pb2.NOT_FOUND, "SESSION_UNKNOWN"))
        for toy in (home, other):
            toy.fail_items("Reset", *[status(code_pb2.FAILED_PRECONDITION, "NOT_REPLAYABLE")] * 9)
        with pytest.raises(EpisodeLost, match="NOT_REPLAYABLE"):
            await episode.step("a")
        assert other.service.count("Reset") <= 2


async def test_an_address_that_refuses_an_episode_is_asked_once(toys):
    """Even where every other one is known to be away."""
    first, second = await toys(), await toys()
    async with aconnect([first.address, second.address], failover=0.0, patience=10.0) as client:
        episode = await client.reset("toy", level_seed=1)
        home, other = (first, second) if first.service.sessions else (second, first)
        home.fail_before("Step", status(code_pb2.UNAVAILABLE))
        for toy in (home, other):
            toy.fail_items("Reset", status(code_pb2.FAILED_PRECONDITION, "NOT_REPLAYABLE"))
        with pytest.raises(EpisodeLost, match="NOT_REPLAYABLE"):
            await episode.step("a")
        assert (home.service.count("Reset"), other.service.count("Reset")) == (2, 1)


async def test_a_replay_that_ends_elsewhere_is_lost(toy, client):
    episode = await client.reset("toy", level_seed=1)
    await episode.step("a")
    toy.service.sessions.clear()
    toy.service.forgets_turns = True
    with pytest.raises(EpisodeLost, match="the replay ended at step 0 with digest"):
        await episode.step("b")


@pytest.mark.parametrize(
    "failure",
    [status(code_pb2.INTERNAL, "ENVIRONMENT_FAILED"), status(code_pb2.DEADLINE_EXCEEDED, "STEP_DEADLINE")],
)
async def test_a_failed_environment_is_the_result_and_never_replayed(toy, client, failure):
    episode = await client.reset("toy", level_seed=1)
    toy.fail_items("Step", failure)
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match="level seed 1"):
            await episode.step("a")
    assert (toy.service.count("Step"), toy.service.count("Reset")) == (1, 1)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (status(code_pb2.NOT_FOUND, "UNKNOWN_ENVIRONMENT", nearest="toy"), UnknownEnvironment),
        (status(code_pb2.INVALID_ARGUMENT, "INVALID_OPTIONS"), InvalidRequest),
        (status(code_pb2.PERMISSION_DENIED, "SPLIT_NOT_SERVED"), NotServed),
        (status(code_pb2.FAILED_PRECONDITION, "VERSION_MISMATCH"), VersionMismatch),
        (status(code_pb2.UNKNOWN), ProtocolError),
    ],
)
async def test_refusals_are_told_in_place(toy, client, failure, kind):
    requests = [EpisodeRequest(environment_id="toy", level_seed=seed) for seed in range(3)]
    toy.fail_items("Reset", None, failure, None)
    results = await client.reset_many(requests, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["AsyncEpisode", kind.__name__, "AsyncEpisode"]
    assert "level seed 1" in str(results[1])
    assert dict(results[1].metadata) == ({"nearest": "toy"} if kind is UnknownEnvironment else {})
    assert len(toy.service.sessions) == 2
    toy.fail_items("Reset", None, failure, None)
    with pytest.raises(kind):
        await client.reset_many(requests)
    assert len(toy.service.sessions) == 2, "what was started beside a refusal is closed"


async def test_a_step_cut_off_is_collected_with_the_same_actions_only(toy, client):
    episode = await client.reset("toy", level_seed=1)
    toy.service.step_gate = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await episode.step("a")
    toy.service.step_gate.set()
    with pytest.raises(StepOrderError, match="cut off"):
        await episode.step("b")
    with pytest.raises(StepOrderError, match="cut off"):
        await episode.fork()
    assert (await episode.step("a")).observation == "(1, [('a',)])"
    assert toy.service.played == 1
    assert (await episode.step("b")).observation == "(1, [('a',), ('b',)])"


async def test_a_deadline_in_mid_step_loses_nothing(toy):
    async with aconnect(toy.address, deadline=0.1, patience=5.0) as client:
        episode = await client.reset("toy", level_seed=1)
        toy.service.step_gate = asyncio.Event()
        step = asyncio.ensure_future(episode.step("a"))
        await asyncio.sleep(0.5)
        toy.service.step_gate.set()
        assert (await step).observation == "(1, [('a',)])"
        assert toy.service.played == 1
        assert toy.service.count("Step") > 1


async def test_steps_share_requests_within_the_servers_batch(toy, client):
    episodes = await client.reset_many([EpisodeRequest(environment_id="toy", level_seed=n) for n in range(20)])
    assert toy.service.count("Reset") == 3, "8 items a call"
    await client.step_many([(episode, "a") for episode in episodes])
    assert toy.service.batch_sizes == [8, 8, 4]
    await client.close_many(episodes, CloseReason.ABANDONED)
    assert toy.service.count("Close") == 3
    assert toy.service.sessions == {}


async def test_the_same_episode_twice_in_a_call(client):
    episode = await client.reset("toy", level_seed=1)
    with pytest.raises(ValueError, match=r"^1 episode occurs more than once"):
        await client.step_many([(episode, "a"), (episode, "b")])
    other = await client.reset("toy", level_seed=2)
    with pytest.raises(ValueError, match=r"^2 episodes occur more than once"):
        await client.step_many([(episode, "a"), (other, "a"), (episode, "b"), (other, "b")])


async def test_concurrent_calls_on_one_episode_are_played_in_turn(toy, client):
    episode = await client.reset("toy", level_seed=1)
    await asyncio.gather(episode.step("a"), episode.step("b"))
    assert episode.turns == (("a",), ("b",))


async def test_lone_surrogates_are_replaced_before_they_can_fail_others(client):
    episode = await client.reset("toy", level_seed=1)
    await episode.step(["a\ud800b", "\U0001f600"])
    assert episode.turns == (("a\ufffdb", "\U0001f600"),)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
async def test_a_seed_out_of_range(client, seed):
    with pytest.raises(ValueError, match="2\\^64"):
        await client.reset("toy", level_seed=seed)
    with pytest.raises(ValueError, match="2\\^64"):
        await client.reset("toy", noise_seed=seed)
    episode = await client.reset("toy", level_seed=(1 << 64) - 1)
    assert episode.level_seed == (1 << 64) - 1
    with pytest.raises(ValueError, match="2\\^64"):
        await episode.fork(noise_seed=seed)


async def test_pages_are_read_to_the_end(client):
    assert [summary.id for summary in await client.environments()] == ["toy0", "toy1", "toy2"]


async def test_closing_ends_what_is_under_way(toy):
    client = aconnect(toy.address)
    episode = await client.reset("toy", level_seed=1)
    toy.service.step_gate = asyncio.Event()
    step = asyncio.ensure_future(episode.step("a"))
    await asyncio.sleep(0.1)
    await client.close()
    await client.close()
    with pytest.raises(ServerUnavailable, match="closed"):
        await step
    with pytest.raises(ServerUnavailable, match="closed"):
        await client.reset("toy")
    await episode.close()
    toy.service.step_gate.set()


async def test_an_episode_that_was_dropped_counts_no_more(toys):
    first, second = await toys(), await toys()
    async with aconnect([first.address, second.address]) as client:
        kept = [await client.reset("toy", level_seed=1)]
        await client.reset("toy", level_seed=1)
        # The event loop holds the result that it woke this test with until the next turn.
        await asyncio.sleep(0)
        gc.collect()
        kept.append(await client.reset("toy", level_seed=1))
        assert (len(first.service.sessions), len(second.service.sessions)) == (1, 2)
