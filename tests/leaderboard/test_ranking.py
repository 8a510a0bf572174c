"""Rankings against numbers worked by hand, enumeration, and boards whose truth is known."""

import itertools
import math

import numpy as np
import pytest

from turngym_leaderboard import ranking, statistics
from turngym_leaderboard.ranking import MISSING, Environment, Pair, rank


def board(*agents: str, attempts: int = 1, weight: float = 1.0) -> Environment:
    """Agents by a digit for each instance: its solved attempts; `-` where they are not known."""
    solved = [[MISSING if mark == "-" else int(mark) for mark in agent] for agent in agents]
    return Environment(np.array(solved), attempts, weight)


def test_three_agents_by_hand():
    # b solves ten instances that a does not, and c is b with one of them lost: (a, b) 10:0, (a, c) 9:0, (b, c) 0:1.
    told = rank([board("0" * 10 + "11", "1" * 12, "1" * 9 + "011")])
    assert [(p.first, p.second) for p in told.pairs] == [(0, 1), (0, 2), (1, 2)]
    assert [p.difference for p in told.pairs] == pytest.approx([10 / 12, 9 / 12, -1 / 12])
    assert [p.p_value for p in told.pairs] == pytest.approx([2 / 2**10, 2 / 2**9, 1])
    assert [p.adjusted for p in told.pairs] == pytest.approx([3 * 2 / 2**10, 2 * 2 / 2**9, 1])
    assert told.scores == pytest.approx((2 / 12, 1, 11 / 12))
    assert told.order == (1, 2, 0)
    # Nobody is better than b or c, one of three is worse than either; both are better than a.
    assert told.ranks == ((3, 3), (1, 2), (1, 2))
    assert told.ties == ((1, 2),)


def test_one_attempt_is_mcnemars_exact_test_and_several_are_the_sign_flip_test():
    generator = np.random.default_rng(1)
    for attempts in (1, 3):
        solved = generator.integers(0, attempts + 1, size=(4, 25))
        told = rank([Environment(solved, attempts)])
        for pair in told.pairs:
            one, other = (
                [[k < solved[agent, i] for k in range(attempts)] for i in range(25)]
                for agent in (pair.first, pair.second)
            )
            expected = statistics.paired_difference(one, other)
            assert (pair.difference, pair.p_value) == pytest.approx((expected.value, expected.p_value))
        assert [p.adjusted for p in told.pairs] == pytest.approx(statistics.holm([p.p_value for p in told.pairs]))


def test_instances_that_one_of_two_has_not_are_left_out_of_that_pair_only():
    told = rank([board("0000--", "111111", "11----")])
    assert [(p.instances, p.difference) for p in told.pairs] == [(4, 1.0), (2, 1.0), (2, 0.0)]
    assert [p.p_value for p in told.pairs] == pytest.approx([2 / 16, 2 / 4, 1])
    assert told.scores == (0.0, 1.0, 1.0)
    apart = rank([board("01--", "--01")])
    assert [(p.instances, p.difference, p.p_value) for p in apart.pairs] == [(0, 0.0, 1.0)]


def enumerated(environments: list[Environment]) -> float:
    """P-value of the weighted difference of two agents, over every pattern of signs."""
    steps = [
        float(d) * e.weight / (e.attempts * e.solved.shape[1]) for e in environments for d in e.solved[1] - e.solved[0]
    ]
    observed = abs(sum(steps)) - 1e-12
    patterns = list(itertools.product((1, -1), repeat=len(steps)))
    return sum(abs(sum(s * d for s, d in zip(signs, steps, strict=True))) >= observed for signs in patterns) / len(
        patterns
    )


def test_several_environments_against_enumeration():
    # Weights that no grid has in common; rounding may only raise the p-value, and hardly does.
    environments = [
        board("001002", "112110", attempts=2, weight=math.pi),
        board("0110", "1111", weight=1.0),
        board("01", "31", attempts=3, weight=0.37),
    ]
    told = rank(environments)
    expected = enumerated(environments)
    assert expected <= told.pairs[0].p_value <= expected + 0.01
    assert told.pairs[0].difference == pytest.approx(math.pi * 3 / 12 + 2 / 4 + 0.37 * 3 / 6)
    assert told.pairs[0].instances == 12


def test_an_environment_in_two_halves_is_the_whole():
    generator = np.random.default_rng(2)
    solved = generator.integers(0, 3, size=(3, 60))
    whole = rank([Environment(solved, 2)])
    halves = rank([Environment(solved[:, :30], 2, 0.5), Environment(solved[:, 30:], 2, 0.5)])
    assert halves.scores == pytest.approx(whole.scores)
    for one, other in zip(halves.pairs, whole.pairs, strict=True):
        assert one.difference == pytest.approx(other.difference)
        # A step of the common grid is finer than that of the halves, so nothing is rounded into the tail.
        assert one.p_value == pytest.approx(other.p_value, abs=1e-9)
    assert halves.detectable == pytest.approx(whole.detectable)


def test_weights_make_differences_of_scores_those_of_the_overall_score():
    # Floors and ceilings 0.2 to 0.7, and 0 to 1: scores (p − f)/(c − f), and their mean.
    weights = ranking.overall_weights([0.5, 1.0])
    told = rank([board("0011", "0111", weight=weights[0]), board("01", "00", weight=weights[1])])
    scores = [((0.5 - 0.2) / 0.5 + 0.5) / 2, ((0.75 - 0.2) / 0.5 + 0.0) / 2]
    assert told.pairs[0].difference == pytest.approx(scores[1] - scores[0])


def test_a_board_won_outright_in_two_environments_keeps_its_tiny_p_value():
    told = rank([board("0" * 40, "1" * 40), board("0" * 30, "1" * 30, weight=0.7)])
    # All 70 instances one way, or all the other.
    assert told.pairs[0].p_value == pytest.approx(2.0**-69, rel=1e-9, abs=1e-12)
    assert told.pairs[0].p_value > 0


def pair(first: int, second: int, *, differ: bool) -> Pair:
    """The earlier agent is the better one."""
    return Pair(first, second, -0.1, 10, 0.0, 0.01 if differ else 0.5)


def test_rank_ranges_and_tie_groups_of_a_chain():
    # Neighbours are alike, the ends are not: 0–1, 1–2 and 2–3 are ties, 0 and 3 differ from all but a neighbour.
    alike = {(0, 1), (1, 2), (2, 3)}
    pairs = [pair(*places, differ=places not in alike) for places in itertools.combinations(range(4), 2)]
    assert ranking.rank_ranges(4, pairs) == ((1, 2), (1, 3), (2, 4), (3, 4))
    assert ranking.tie_groups((0, 1, 2, 3), pairs) == ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(
    ("differing", "groups"),
    [
        ({(0, 2)}, ((0, 1), (1, 2, 3, 4))),
        ({(0, 1), (0, 2), (0, 3), (0, 4)}, ((1, 2, 3, 4),)),
        ({(1, 3)}, ((0, 1, 2), (2, 3, 4))),
        (set(itertools.combinations(range(5), 2)), ()),
        (set(), ((0, 1, 2, 3, 4),)),
        # The last alone differs from all; a run that ends where the one before it did is no group of its own.
        ({(0, 4), (1, 4), (2, 4), (3, 4)}, ((0, 1, 2, 3),)),
    ],
)
def test_tie_groups_are_the_longest_runs(differing, groups):
    pairs = [pair(*places, differ=places in differing) for places in itertools.combinations(range(5), 2)]
    assert ranking.tie_groups(range(5), pairs) == groups


def test_one_agent_alone_has_a_rank_and_nothing_to_detect():
    told = rank([board("0101")])
    assert (told.ranks, told.ties, told.pairs, told.detectable) == (((1, 1),), (), (), None)


def test_equal_scores_keep_the_given_order():
    assert rank([board("01", "10", "11")]).order == (2, 0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rank([]), "0 environments"),
        (lambda: rank([board("01"), board("01", "10")]), r"agents: expected as many"),
        (lambda: rank([board("01", "--")]), "agent 1 has no instance"),
        (lambda: board("02"), "0 to 2 solved attempts: expected 0 to 1"),
        (lambda: board("01", weight=0), "weight 0"),
        (lambda: ranking.solved_attempts([{0: [True, True]}], 1), "2 attempts on an instance on which 1"),
    ],
)
def test_what_cannot_be_ranked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_solved_attempts_of_outcomes_by_instance():
    agents = [{7: [True, False], 3: [True, None]}, {3: [True, True], 9: [False]}, {}]
    # Instances 3, 7 and 9.
    expected = [[MISSING, 1, MISSING], [2, MISSING, MISSING], [MISSING] * 3]
    assert ranking.solved_attempts(agents, 2).tolist() == expected


def test_against_an_agent_of_single_attempts_the_first_ones_are_compared():
    # The first one solves its first attempts alone; the second all; the third was dealt single ones, and solves none.
    outcomes = [
        {k: [True, False] for k in range(9)},
        {k: [True, True] for k in range(9)},
        {k: [False] for k in range(9)},
    ]
    first = ranking.first_attempts(outcomes, 2)
    assert first.tolist() == [[2] * 9, [2] * 9, [0] * 9]
    single = np.array([False, False, True])
    solved = np.where(single[:, np.newaxis], first, ranking.solved_attempts(outcomes, 2))
    told = rank([Environment(solved, 2, first=first, single=single)])
    assert told.scores == pytest.approx((0.5, 1.0, 0.0))
    assert [p.difference for p in told.pairs] == pytest.approx([0.5, -1.0, -1.0])
    assert [p.p_value for p in told.pairs] == pytest.approx([2 / 2**9] * 3)
    two = Environment(solved, 2, first=first, single=single).of([True, False, True], 3.0)
    assert [p.difference for p in rank([two]).pairs] == pytest.approx([-3.0])


def test_an_equal_of_single_attempts_is_told_apart_no_more_often_than_the_level():
    generator = np.random.default_rng(3)
    chances = generator.choice([0.1, 0.9], size=40)
    found = []
    for _ in range(400):
        whole = generator.random((40, 4)) < chances[:, np.newaxis]
        alone = generator.random(40) < chances
        outcomes = [{k: list(map(bool, whole[k])) for k in range(40)}, {k: [bool(alone[k])] for k in range(40)}]
        first = ranking.first_attempts(outcomes, 4)
        solved = np.where([[False], [True]], first, ranking.solved_attempts(outcomes, 4))
        [pair] = rank([Environment(solved, 4, first=first, single=np.array([False, True]))]).pairs
        found.append(pair.p_value <= 0.05)
    assert np.mean(found) <= 0.05


def test_smallest_detectable_by_hand():
    # z = z(0.975) + z(0.8) = 1.959964 + 0.841621; of ten agents' 45 pairs z(1 − 0.05/90) is 3.260767.
    for pairs, z in ((1, 2.801585), (45, 4.102388)):
        told = ranking.smallest_detectable(0.03, 1 / 512, pairs)
        assert told**2 == pytest.approx(z**2 * (0.03**2 + told / 512), rel=1e-6)
        # Agents that never differed.
        assert ranking.smallest_detectable(0.0, 1 / 512, pairs) == pytest.approx(z**2 / 512, rel=1e-6)
    # The board's own error: two agents differ on 2 of 4 instances, so the variance of their difference is 2/16.
    told = rank([board("0101", "0110")]).detectable
    assert told is not None
    assert told**2 == pytest.approx(2.801585**2 * (2 / 16 + told / 4), rel=1e-6)


def boards(generator: np.random.Generator, better: float, attempts: int, times: int):
    """Boards of five agents on 200 instances, the last of them better than the others by so much."""
    for _ in range(times):
        chances = generator.beta(1.0, 1.0, 200) * (1 - better)
        agents = np.array([*[chances] * 4, chances + better])
        yield rank([Environment(generator.binomial(attempts, agents), attempts)])


@pytest.mark.parametrize(("attempts", "times"), [(1, 1000), (3, 200)])
def test_boards_of_equals_and_boards_on_which_one_is_better_by_what_is_detectable(attempts, times):
    generator = np.random.default_rng(3)
    equals = list(boards(generator, 0.0, attempts, times))
    false = [min(pair.adjusted for pair in told.pairs) <= 0.05 for told in equals]
    assert np.mean(false) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)
    detectable = float(np.mean([told.detectable for told in equals]))
    better = boards(generator, detectable, attempts, times // 2)
    found = [pair.adjusted <= 0.05 for told in better for pair in told.pairs if pair.second == 4]
    assert 0.77 <= np.mean(found) <= 0.95
