import pytest

from turngym_client import parse_answer
from turngym_client.answer import INVALID


@pytest.mark.parametrize(
    ("text", "reasoning", "actions"),
    [
        ("<think>go up</think><answer>Up</answer>", "go up", ("Up",)),
        ("<think>a</think><answer>Up || Down||Left</answer>", "a", ("Up", "Down", "Left")),
        ("  \n<think>\n a b \n</think>\n\n<answer> Up </answer>\n ", "a b", ("Up",)),
        ("<think></think><answer>Up</answer>", "", ("Up",)),
        ("<think>x</think><answer>|| Up || || Down ||</answer>", "x", ("Up", "Down")),
        ("<think>x</think><answer>a | b</answer>", "x", ("a | b",)),
        ("<think>1 < 2 && 3 > 2</think><answer>a<b</answer>", "1 < 2 && 3 > 2", ("a<b",)),
        ("<think>箱を押す</think><answer>上 || 下</answer>", "箱を押す", ("上", "下")),
        ("<think>x</think><answer>two words\nand a line</answer>", "x", ("two words\nand a line",)),
        ("<think>x</think><answer>\u3000Up\u00a0</answer>", "x", ("Up",)),
    ],
)
def test_valid(text, reasoning, actions):
    parsed = parse_answer(text)
    assert (parsed.reasoning, parsed.actions, parsed.valid_format) == (reasoning, actions, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Up",
        "<answer>Up</answer>",
        "<think>x</think>",
        "<think>x</think><answer>Up",
        "<think>x<answer>Up</answer>",
        "<think>x</think><answer>Up</ans",
        "<think>x</think><answer></answer>",
        "<think>x</think><answer> || || </answer>",
        "<answer>Up</answer><think>x</think>",
        "<think>x</think><answer>Up</answer> and so on",
        "well: <think>x</think><answer>Up</answer>",
        "<think>x</think> then <answer>Up</answer>",
        "<think>x</think><answer>Up</answer><answer>Down</answer>",
        "<think>x</think><think>y</think><answer>Up</answer>",
        "<think>x<think>y</think></think><answer>Up</answer>",
        "<think>x</think><answer><answer>Up</answer></answer>",
        "<think>I answer <answer>Up</answer></think><answer>Up</answer>",
        "<THINK>x</THINK><answer>Up</answer>",
    ],
)
def test_invalid_is_one_empty_action(text):
    assert parse_answer(text) == INVALID
    assert INVALID.actions == ("",)
    assert not INVALID.valid_format


def test_without_separator_the_answer_is_one_action():
    text = "<think>x</think><answer> SELECT a || b FROM t </answer>"
    assert parse_answer(text, separator="").actions == ("SELECT a || b FROM t",)
    assert parse_answer("<think>x</think><answer>  </answer>", separator="") == INVALID


@pytest.mark.parametrize(
    ("text", "separator", "told"), [(None, "||", r"text is None"), ("x", None, "separator is None")]
)
def test_what_is_no_text(text, separator, told):
    with pytest.raises(TypeError, match=rf"^{told} \(NoneType\), but must be a str"):
        parse_answer(text, separator)


def test_another_separator():
    assert parse_answer("<think>x</think><answer>a;b||c</answer>", separator=";").actions == ("a", "b||c")


def test_max_actions_keeps_the_first():
    text = "<think>x</think><answer>a||||b||c</answer>"
    assert parse_answer(text, max_actions=2).actions == ("a", "b")
    assert parse_answer(text, max_actions=5).actions == ("a", "b", "c")
