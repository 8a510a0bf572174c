"""What a reader is told beside the numbers."""

import pytest

from turngym_leaderboard import tables
from turngym_leaderboard.protocol import REFERENCE
from turngym_leaderboard.record import (
    CodeRecord,
    Comparison,
    EnvironmentRecord,
    LimitsRecord,
    ProtocolRecord,
    Record,
    RowRecord,
)


def record(**description: str) -> Record:
    row = RowRecord(agent="mine", description=description, decoding="T = 1", statistics=None, episodes=())
    kept = Record(
        created="2026-01-01T00:00:00+00:00",
        code=CodeRecord(commit=None, modified=None, python="", platform="", packages={}),
        server=(),
        server_version="",
        protocol=ProtocolRecord.of(REFERENCE),
        environment=EnvironmentRecord(
            version="1.0",
            split_epoch=2,
            options_json="{}",
            limits=LimitsRecord.of(REFERENCE.limits),
            draws=0,
            instances=(),
        ),
        sessions=1,
        rows=(row,),
        comparisons=(),
    )
    # As many instances as there are, so that nothing is said of them.
    return kept.model_copy(update={"protocol": kept.protocol.model_copy(update={"instances": 0})})


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"trained_in": "sokoban", "trained_split": "train", "trained_split_epoch": "2"}, []),
        ({"trained_in": "sokoban", "trained_split": "all"}, ["nothing was held out"]),
        ({"trained_in": "sokoban", "trained_split": "train", "trained_split_epoch": "1"}, ["split epoch 1"]),
        ({"trained_in": "bandit", "trained_split": "all", "trained_split_epoch": "1"}, []),
        ({}, []),
    ],
)
def test_an_agent_that_may_have_met_the_worlds_is_named(description, said):
    notes = tables.notes(record(**description))
    assert len(notes) == len(said)
    assert all(words in note and note.startswith("mine:") for words, note in zip(said, notes, strict=True))


@pytest.mark.parametrize(("low", "high", "said"), [(0.01, 0.09, "excludes 0"), (-0.01, 0.11, "includes 0")])
def test_a_comparison_says_whether_zero_is_excluded(low, high, said):
    line = tables.comparison_line(
        Comparison(
            first="before",
            second="after",
            difference=0.05,
            low=low,
            high=high,
            instances=512,
            p_value=0.01,
            holm_p_value=0.03,
            test="mcnemar",
        )
    )
    assert line.startswith("after − before: +5.0 points, 95 % interval ")
    assert said in line
    assert ("the test decides" in line) == (low < 0)
