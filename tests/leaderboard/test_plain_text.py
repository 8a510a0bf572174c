"""Text of agents, made harmless."""

import time

import pytest

from turngym_leaderboard.pages.plain_text import harmless, name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("two\n\tlines", "two\n\tlines"),
        ("a\r\nb", "a\nb"),
        ("√ 漢字 שלום 👩🏽 ❤️", "√ 漢字 שלום 👩🏽 ❤️"),
        ("\x00\x1b[31m\x7f\x85", "⟨U+0000⟩⟨U+001B⟩[31m⟨U+007F⟩⟨U+0085⟩"),
        ("exe\u202egpj", "exe⟨U+202E⟩gpj"),
        ("\u2066a\u2069\u200f\u061c", "⟨U+2066⟩a⟨U+2069⟩⟨U+200F⟩⟨U+061C⟩"),
        ("al\u200bice\u00ad\ufeff", "al⟨U+200B⟩ice⟨U+00AD⟩⟨U+FEFF⟩"),
        ("half \ud83d", "half ⟨U+D83D⟩"),
        ("a\u2028b", "a⟨U+2028⟩b"),
        ("hidden\U000e0041", "hidden⟨U+E0041⟩"),
        ("e" + "\u0301" * 50, "e" + "\u0301" * 4),
    ],
)
def test_what_reorders_or_hides_is_written_out_and_the_rest_left_alone(text, told) -> None:
    assert harmless(text) == told


def test_long_text_is_cut_and_says_how_much_is_missing() -> None:
    assert harmless("x" * 1_500, 1_000) == "x" * 1_000 + "… (500 more characters)"
    assert harmless("x" * 1_000, 1_000) == "x" * 1_000


def test_a_megabyte_is_cut_before_it_is_looked_at() -> None:
    started = time.perf_counter()
    assert len(harmless("\u202e" * 10_000_000)) < 200_000
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("my agent", "my agent"),
        ("  two\n lines ", "two lines"),
        ("", "(no name)"),
        (" \n", "(no name)"),
        ("x" * 81, "x" * 80 + "…"),
        ("admin\u202e", "admin⟨U+202E⟩"),
    ],
)
def test_a_name_is_one_short_line(text, told) -> None:
    assert name(text) == told
