"""What may be called what."""

import pytest

from turngym_leaderboard.naming import checked_agent_name, checked_name


@pytest.mark.parametrize(
    "text", ["alice", "after RL", "Zoë-7b (greedy)", "深度学习", "한국", "agent 🤖", "o", "oracles"]
)
def test_what_can_be_seen_is_a_name(text):
    assert checked_agent_name(text) == text


@pytest.mark.parametrize(
    "sign",
    # Fillers, blanks, joiners, selectors, tags, private use, unassigned.
    [
        *"\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u180b\u200b\u200d\u2060\ufe0f\ufeff\u00ad\ue000\u0378",
        *"\U000e0041\U000e0100\U000f0000\U0001d159",
    ],
)
def test_what_cannot_be_seen_is_no_part_of_a_name(sign):
    for text in (sign, f"alice{sign}", f"a{sign}b"):
        with pytest.raises(ValueError, match=r"expected (characters that can be seen|one line of printable)"):
            checked_name(text)


@pytest.mark.parametrize("text", [" alice", "alice\u00a0", "a\nb", "\u202ealice", "\u0301alice"])
def test_a_name_leaves_its_line_as_it_is(text):
    with pytest.raises(ValueError, match="expected "):
        checked_name(text)


@pytest.mark.parametrize("text", ["oracle", "ORACLE", "Random", "ｏｒａｃｌｅ", "𝐫𝐚𝐧𝐝𝐨𝐦"])
def test_the_boards_own_rows_have_their_names_alone(text):
    with pytest.raises(ValueError, match="is what a row of the board's own is called; give it another name"):
        checked_agent_name(text)
    assert checked_name(text) == text
