"""Rows and comparisons from episodes written by hand."""

import math

import pytest

from turngym_leaderboard import statistics, summary
from turngym_leaderboard.protocol import Instance
from turngym_leaderboard.record import EpisodeRecord, RowRecord


def episode(draw: int, success: bool | None, *, attempt: int = 0, turns: int = 2, tokens: int | None = None, **others):
    fields = {
        "draw": draw,
        "attempt": attempt,
        "level_seed": draw,
        "noise_seed": 0,
        "agent_seed": 0,
        "instance_id": f"i{draw}",
        "world_id": f"w{draw}",
        "outcome": "unresolved" if success is None else "played",
        "success": success,
        "truncated": not success,
        "end_reason": "",
        "actions": (("Up",),) * turns,
        "rewards": (-0.5,) * turns,
        "invalid_turns": 0,
        "unparsed_turns": 0,
        "cut_off_turns": 0,
        "tokens": tokens,
        "digest": "",
    }
    return EpisodeRecord.model_validate({**fields, **others})


def row(name: str, episodes) -> RowRecord:
    return RowRecord(agent=name, description={}, decoding="", statistics=None, episodes=tuple(episodes))


def exact(values) -> summary.Reference:
    return summary.Reference(dict(enumerate(values)), "exact")


def test_a_row_by_hand():
    episodes = [
        episode(0, True, turns=1, tokens=10),
        episode(1, False, turns=3, tokens=30, invalid_turns=2, unparsed_turns=1),
        episode(2, True, turns=2, tokens=20, cut_off_turns=1),
        episode(3, False, turns=2, tokens=20),
    ]
    told = summary.summarise(episodes, exact([0.25, 0.25, 0.5, 0.0]), exact([1.0, 1.0, 1.0, 0.25]), samples=True)
    assert told.success is not None
    assert told.success.rate == 0.5
    assert told.score is not None
    # The same instances as in the statistics' hand-worked example.
    assert told.score.value == pytest.approx(4 / 9)
    assert (told.score.floor_source, told.score.ceiling_source, told.score.method) == ("exact", "exact", "linearised")
    assert (told.turns, told.tokens, told.mean_return) == (2.0, 20.0, -1.0)
    assert (told.turns_per_solved, told.tokens_per_solved) == (4.0, 40.0)
    assert (told.invalid_action_rate, told.unparsed_rate, told.cut_off_rate) == (2 / 8, 1 / 8, 1 / 8)
    assert told.truncation_rate == 0.5
    assert (told.unresolved, told.ranked, told.pass_at) == (0, True, {})


def test_unresolved_episodes_are_neither_failures_nor_successes():
    episodes = [episode(0, True), episode(1, False), episode(2, None), episode(3, True)]
    told = summary.summarise(episodes, exact([0.0] * 4), exact([1.0] * 4), samples=False)
    assert told.success is not None
    assert told.success.rate == pytest.approx(2 / 3)
    assert (told.instances, told.episodes, told.unresolved, told.ranked) == (3, 4, 1, False)
    assert (told.low_bound, told.high_bound) == (0.5, 0.75)


def test_one_unresolved_in_a_hundred_is_still_ranked_and_two_are_not():
    def ranked(unresolved: int) -> bool:
        episodes = [episode(k, None if k < unresolved else True) for k in range(100)]
        return summary.summarise(episodes, exact([0.0] * 100), exact([1.0] * 100), samples=False).ranked

    assert ranked(1)
    assert not ranked(2)


def test_nothing_resolved_has_no_rate():
    told = summary.summarise([episode(0, None), episode(1, None)], exact([0, 0]), exact([1, 1]), samples=False)
    assert told.success is None
    assert told.score is None
    assert (told.turns, told.low_bound, told.high_bound) == (None, 0.0, 1.0)


def test_pass_at_k_is_told_only_of_an_agent_that_samples():
    episodes = [episode(d, d == 0 or a == 0, attempt=a) for d in range(3) for a in range(2)]
    floor, ceiling = exact([0.0] * 3), exact([1.0] * 3)
    told = summary.summarise(episodes, floor, ceiling, samples=True)
    # Successes 2, 1, 1 of 2: at least one always; both on one instance of three.
    assert told.pass_at == pytest.approx({1: 2 / 3, 2: 1.0})
    assert told.pass_hat == pytest.approx({1: 2 / 3, 2: 1 / 3})
    assert summary.summarise(episodes, floor, ceiling, samples=False).pass_at == {}


def instance(draw: int, floor: float | None, ceiling: float | None) -> Instance:
    return Instance(
        draw=draw, level_seed=draw, instance_id=f"i{draw}", world_id=f"w{draw}", floor=floor, ceiling=ceiling
    )


def test_floors_are_the_scripted_rows_where_any_is_not_exact():
    played = [episode(0, True), episode(0, False, attempt=1), episode(1, None), episode(2, True)]
    instances = [instance(0, 0.1, 1.0), instance(1, 0.2, 1.0), instance(2, None, 1.0)]
    floor = summary.reference(instances, "floor", played)
    assert (dict(floor.values), floor.source) == ({0: 0.5, 2: 1.0}, "played")
    ceiling = summary.reference(instances, "ceiling", [])
    assert (dict(ceiling.values), ceiling.source) == ({0: 1.0, 1: 1.0, 2: 1.0}, "exact")


def test_played_floors_are_bootstrapped():
    episodes = [episode(k, k % 2 == 0) for k in range(40)]
    floor = summary.Reference({k: float(k % 5 == 0) for k in range(40)}, "played")
    told = summary.summarise(episodes, floor, exact([1.0] * 40), samples=False)
    assert told.score is not None
    assert (told.score.method, told.score.floor_source) == ("bootstrap", "played")
    # Success 20/40, floor 8/40.
    assert told.score.value == pytest.approx((20 - 8) / (40 - 8))


def test_no_score_without_room_between_floor_and_ceiling():
    told = summary.summarise([episode(0, True), episode(1, True)], exact([1, 1]), exact([1, 1]), samples=False)
    assert told.score is None
    assert "not above" in told.score_missing


def test_comparisons_pair_by_instance_and_leave_out_what_is_unresolved():
    before = row("before", [episode(0, False), episode(1, True), episode(2, False), episode(3, False)])
    after = row("after", [episode(1, True), episode(0, True), episode(3, None), episode(2, False)])
    third = row("third", [episode(d, True) for d in range(4)])
    compared = summary.compare([before, after, third])
    assert [(c.first, c.second, c.instances) for c in compared] == [
        ("before", "after", 3),
        ("before", "third", 4),
        ("after", "third", 3),
    ]
    # Draws 0, 1 and 2: +1, 0, 0.
    assert compared[0].difference == pytest.approx(1 / 3)
    expected = statistics.paired_difference([[False], [True], [False]], [[True], [True], [False]])
    assert (compared[0].low, compared[0].high) == (expected.interval.low, expected.interval.high)
    # McNemar: 1 gained of 1, 3 of 3, 1 of 1: p = 1, 1/4, 1; Holm: 3 · 1/4 and then 1.
    assert [c.p_value for c in compared] == pytest.approx([1, 0.25, 1])
    assert [c.holm_p_value for c in compared] == pytest.approx([1, 0.75, 1])


def test_agents_are_ranked_among_those_that_are_ranked_and_decoded_alike():
    def told(name: str, outcomes, decoding: str = "T = 1") -> RowRecord:
        episodes = tuple(episode(draw, success) for draw, success in enumerate(outcomes))
        statistics = summary.summarise(episodes, exact([0.0] * 8), exact([1.0] * 8), samples=False)
        return RowRecord(agent=name, description={}, decoding=decoding, statistics=statistics, episodes=episodes)

    never, always = [False] * 8, [True] * 8
    rows = [
        told("random", never),
        told("none", never),
        told("most", [*[True] * 7, False]),
        told("lost", [*[True] * 7, None]),
        told("all", always),
        told("all (greedy)", always, "greedy"),
        told("none (greedy)", never, "greedy"),
        told("oracle", always),
    ]
    (sampled, ranks), (greedy, greedy_ranks) = summary.rank_agents(rows, attempts=1, greedy=False)
    assert (sampled, greedy) == (["none", "most", "all"], ["all (greedy)", "none (greedy)"])
    # Holm over three pairs: none and all 3·2/2⁸, none and most 2·2/2⁷, most and all 1; over one pair 2/2⁸.
    assert [pair.adjusted for pair in ranks.pairs] == pytest.approx([4 / 2**7, 3 / 2**7, 1])
    assert ranks.ranks == ((3, 3), (1, 2), (1, 2))
    assert [pair.adjusted for pair in greedy_ranks.pairs] == pytest.approx([2 / 2**8])
    [(everybody, _)] = summary.rank_agents(rows, attempts=1, greedy=True)
    assert everybody == [*sampled, *greedy]
    assert summary.rank_agents([rows[0], rows[1], rows[-1]], attempts=1, greedy=False) == ()


def test_what_a_row_spent_and_failed_by():
    fault = {"outcome": "agent_fault", "fault": "timeout: no answer within 9 s"}
    episodes = [
        episode(0, True, turns=1, tokens=10, tokens_in=100, cost=0.25, failures={"empty": 1}),
        episode(1, False, turns=2, tokens=30, tokens_in=300, cost=0.5, failures={"empty": 1, "refused": 2}),
        episode(2, False, turns=0, **fault),
        episode(3, None, turns=1, tokens=1000, tokens_in=1000, cost=9.0),
    ]
    told = summary.summarise(episodes, exact([0.0] * 4), exact([1.0, 1.0, 1.0, 0.5]), samples=False)
    assert told.spent is not None
    assert told.spent.model_dump() == {"solved": 1, "turns": 3, "tokens": 40, "tokens_in": 400, "cost": 0.75}
    assert (told.spent.per_solved("cost"), told.spent.per_solved("tokens_in")) == (0.75, 400)
    assert (told.faults, told.failures) == ({"timeout": 1}, {"empty": 2, "refused": 2})
    # Σ(c − f) = 3.5, and the unresolved instance had failed or been solved.
    assert (told.score_low_bound, told.score_high_bound) == pytest.approx((1 / 3.5, 2 / 3.5))
    nothing = summary.summarise([episode(0, False)], exact([0.0]), exact([1.0]), samples=False)
    assert nothing.spent is not None
    assert (nothing.spent.cost, nothing.spent.per_solved("cost"), nothing.spent.per_solved("turns")) == (None,) * 3
    assert (nothing.score, nothing.score_low_bound, nothing.faults, nothing.failures) == (None, None, {}, {})


def test_an_overall_score_by_hand():
    floor, ceiling = exact([0.0] * 4), exact([1.0] * 4)
    first = summary.summarise(
        [episode(d, d < 3, tokens=10, cost=0.5) for d in range(4)], floor, exact([1.0, 1.0, 1.0, 0.75]), samples=False
    )
    second = summary.summarise(
        [episode(d, None if d == 3 else d == 0, tokens=20, cost=1.0) for d in range(4)], floor, ceiling, samples=False
    )
    told = summary.overall({"one": first, "two": second})
    # 3/3.75 and 1/3; with what is unresolved 1/4 to 2/4.
    assert told.value == pytest.approx((0.8 + 1 / 3) / 2)
    assert (told.low_bound, told.high_bound) == pytest.approx(((0.8 + 0.25) / 2, (0.8 + 0.5) / 2))
    assert first.score is not None
    assert second.score is not None
    assert told.standard_error == pytest.approx(math.hypot(first.score.standard_error, second.score.standard_error) / 2)
    assert told.low == pytest.approx(
        told.value - math.hypot(first.score.value - first.score.low, second.score.value - second.score.low) / 2
    )
    assert (told.episodes, told.unresolved, told.ranked, told.missing) == (8, 1, False, "")
    assert told.spent is not None
    # What is unresolved was not spent by the agent.
    assert told.spent.model_dump() == {"solved": 4, "turns": 14, "tokens": 100, "tokens_in": None, "cost": 5.0}
    assert summary.overall({"one": first}).ranked


def test_no_overall_score_without_one_in_every_environment():
    told = summary.summarise([episode(0, True), episode(1, False)], exact([0, 0]), exact([1, 1]), samples=False)
    without = summary.summarise([episode(0, True), episode(1, True)], exact([1, 1]), exact([1, 1]), samples=False)
    overall = summary.overall({"one": told, "two": without, "three": None})
    assert (overall.value, overall.low, overall.high_bound, overall.ranked) == (None, None, None, False)
    assert overall.missing == "no normalised score in two, three"
    assert overall.episodes == 4
    with pytest.raises(ValueError, match="at least one environment"):
        summary.overall({})
