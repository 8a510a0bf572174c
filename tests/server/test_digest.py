"""The chain of hashes, against bytes written out by hand."""

import hashlib

import pytest

from turngym_server.sessions.digest import canonical_json, encode_actions, first_digest, noise_digest, turn_digest


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_canonical_json():
    value = {"b": [1, 2.5, None, True], "a": {"z": "é√", "y": '"\n'}}
    assert canonical_json(value) == '{"a":{"y":"\\"\\n","z":"é√"},"b":[1,2.5,null,true]}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_refuses_what_is_no_number(value):
    with pytest.raises(ValueError):
        canonical_json({"x": value})


def test_first_digest():
    expected = sha(
        b"\x02\x00\x00\x00{}"  # identity
        b"\x01\x02\x00\x00\x00\x00\x00\x80"  # noise seed, little-endian
        b"\x03\x00\x00\x00\xe2\x88\x9a"  # √
    )
    assert first_digest("{}", 0x8000000000000201, "√") == expected


def test_noise_digest():
    expected = sha(b"p" * 32 + b"noise" + b"\x03\x00\x00\x00" + b"\xff\x00\x00\x00\x00\x00\x00\x00")
    assert noise_digest(b"p" * 32, 3, 255) == expected


@pytest.mark.parametrize(("success", "byte"), [(None, b"\x02"), (True, b"\x01"), (False, b"\x00")])
def test_turn_digest(success, byte):
    actions = b"\x02\x00\x00\x00" + b"\x02\x00\x00\x00Up" + b"\x00\x00\x00\x00"
    assert encode_actions(["Up", ""]) == actions
    expected = sha(
        b"p" * 32
        + b"\x05\x00\x00\x00"  # step index
        + actions
        + b"\x02\x00\x00\x00##"
        + b"\x00\x00\x00\x00\x00\x00\xf4\xbf"  # −1.25
        + b"\x01\x00"  # terminated, truncated
        + byte
        + b"\x00\x01"  # action_valid, end reason
    )
    assert (
        turn_digest(
            b"p" * 32,
            step_index=5,
            encoded_actions=actions,
            observation="##",
            reward=-1.25,
            terminated=True,
            truncated=False,
            success=success,
            action_valid=False,
            end_reason=1,
        )
        == expected
    )


def test_negative_zero_is_zero():
    def digest(reward: float, *, truncated: bool = True) -> bytes:
        return turn_digest(
            b"",
            step_index=1,
            encoded_actions=b"",
            observation="",
            reward=reward,
            terminated=False,
            truncated=truncated,
            success=None,
            action_valid=True,
            end_reason=2,
        )

    assert digest(-0.0) == digest(0.0)
    assert digest(0.0) != digest(1e-300)
    assert digest(0.0) != digest(0.0, truncated=False)


def test_where_a_text_ends_is_part_of_the_digest():
    assert encode_actions(["ab", "c"]) != encode_actions(["a", "bc"])
    assert encode_actions(["a"]) != encode_actions(["a", ""])
