"""Sealed seeds: what opens them, and that nothing a sealed session says or logs shows what is in them."""

import hashlib
import json
import logging
import os
import re
import stat
import traceback
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sample_environments import DICE, FAULTY, LEVELS, Dice, DiceOptions, make_spec
from serving import details, reason, reset_error, reset_item, serving, start, step
from token_files import write_tokens

from turngym.sealed import Board, CannotOpen, SealKey, Seeds, random_seeds, read_seal_key
from turngym.v1 import environment_pb2 as pb
from turngym_server.access import new_seal_key
from turngym_server.cli import main
from turngym_server.environment import ActionResult, Isolation, Left, NoInstance, Start
from turngym_server.errors import ItemError
from turngym_server.host import EnvironmentHost
from turngym_server.rng import Rng
from turngym_server.sessions.digest import canonical_json, first_digest
from turngym_server.watching.logs import JsonFormatter, TextFormatter

KEY = SealKey(bytes(range(32)))
SEEDS = Seeds(level_seed=7_777_777_777_777_777_777, noise_seed=8_888_888_888_888_888_888)
DICE_BOARD = Board("dice", '{"faces":6,"worlds":1000000}', "all")
FAULTY_BOARD = Board("faulty", '{"reset":"","told":""}', "all")


def sealed_item(board: Board = DICE_BOARD, *, key: SealKey = KEY, seeds: Seeds = SEEDS, **fields) -> pb.ResetItem:
    item = reset_item(board.environment_id, level_seed=None, noise_seed=None, options_json=board.options_json, **fields)
    item.sealed_seed = key.seal(board, seeds)
    return item


def test_what_was_sealed_opens_for_its_board_only():
    sealed = KEY.seal(DICE_BOARD, SEEDS)
    assert KEY.open(DICE_BOARD, sealed)[0] == SEEDS
    assert len(sealed) == 45
    assert sealed != KEY.seal(DICE_BOARD, SEEDS)
    for other in (
        replace(DICE_BOARD, environment_id="dice2"),
        replace(DICE_BOARD, options_json='{"faces":5,"worlds":1000000}'),
        replace(DICE_BOARD, split="train"),
    ):
        with pytest.raises(CannotOpen):
            KEY.open(other, sealed)
    with pytest.raises(CannotOpen):
        SealKey(bytes(32)).open(DICE_BOARD, sealed)


def test_no_other_bytes_open():
    sealed = KEY.seal(DICE_BOARD, SEEDS)
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(CannotOpen):
            KEY.open(DICE_BOARD, bytes(changed))
    for other in (b"", sealed[:-1], sealed + b"\0", sealed[:13]):
        with pytest.raises(CannotOpen):
            KEY.open(DICE_BOARD, other)


def test_seeds_are_drawn_from_all_64_bits():
    drawn = [random_seeds() for _ in range(64)]
    assert max(max(each.level_seed, each.noise_seed) for each in drawn).bit_length() >= 63
    assert len({each.level_seed for each in drawn} | {each.noise_seed for each in drawn}) == 128


def test_a_key_does_not_show_itself():
    assert "key" not in repr(KEY)
    assert repr(KEY.key) not in repr(KEY)


def test_a_key_file_is_made_once_and_read_back(tmp_path, capsys):
    file = tmp_path / "board.key"
    new_seal_key.main([str(file)])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = read_seal_key(file)
    assert len(key.key) == 32
    assert key.open(DICE_BOARD, key.seal(DICE_BOARD, SEEDS))[0] == SEEDS
    with pytest.raises(SystemExit) as left:
        new_seal_key.main([str(file)])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"env_server_seal_key: {file} exists already")
    assert read_seal_key(file) == key


@pytest.mark.parametrize(
    ("mode", "text", "told"),
    [
        (0o644, "A" * 43 + "=", "has mode 644: others may read or change it; expected 600"),
        (0o620, "A" * 43 + "=", "has mode 620"),
        (0o600, "A" * 42 + "==", "holds no seal key: expected 32 bytes in base64"),
        (0o600, "not base64 at all", "holds no seal key"),
        (0o600, "", "holds no seal key"),
    ],
)
def test_key_files_that_are_not_fit_are_refused(tmp_path, mode, text, told):
    file = tmp_path / "board.key"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ValueError, match=told) as refused:
        read_seal_key(file)
    assert not text or text not in str(refused.value)


@pytest.mark.parametrize("put", [lambda path: os.mkfifo(path, 0o600), lambda path: path.symlink_to("/dev/zero")])
def test_a_key_that_is_no_file_is_refused_at_once(put, tmp_path, capsys):
    put(tmp_path / "board.key")
    with pytest.raises(SystemExit) as left:
        main(["--env", "bandit", "--seal-key", str(tmp_path / "board.key")])
    assert left.value.code == 2
    assert "is no regular file" in capsys.readouterr().err


def test_a_group_may_read_a_key_file(tmp_path):
    file = tmp_path / "board.key"
    file.write_text("A" * 43 + "=\n")
    file.chmod(0o640)
    assert read_seal_key(file).key == bytes(32)


def test_the_server_refuses_a_bad_key_file_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--env", "bandit", "--seal-key", str(tmp_path / "none")])
    assert left.value.code == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


async def test_a_sealed_session_plays_the_same_and_shows_nothing():
    async with serving(DICE, seal_key=KEY) as (stub, _):
        item = sealed_item()
        sealed = await start(stub, item)
        shown = await start(stub, level_seed=SEEDS.level_seed, noise_seed=SEEDS.noise_seed)
        assert (sealed.level_seed, list(sealed.noise), sealed.instance_id, sealed.world_id) == (0, [], "", "")
        assert shown.instance_id
        assert sealed.options_json == DICE_BOARD.options_json
        assert sealed.state.observation == shown.state.observation
        for turn in (1, 2, 3):
            hidden, seen = [await step(stub, each.session_id, turn, "roll", "roll") for each in (sealed, shown)]
            assert hidden.transition.observation == seen.transition.observation
            assert list(hidden.transition.action_rewards) == list(seen.transition.action_rewards)
            assert hidden.transition.digest != seen.transition.digest
        assert (await stub.Reset(pb.ResetRequest(items=[item]))).outcomes[0].started.session_id == sealed.session_id


async def test_the_digest_follows_from_key_board_and_seeds():
    """The contract's formula, with the key's digits in the place of the level seed."""
    async with serving(DICE, seal_key=KEY) as (stub, _):
        first, again = await start(stub, sealed_item()), await start(stub, sealed_item())
        assert first.state.digest == again.state.digest
        other_noise = await start(stub, sealed_item(seeds=replace(SEEDS, noise_seed=1)))
        assert other_noise.state.digest != first.state.digest
    async with serving(DICE, seal_key=SealKey(bytes(32))) as (stub, _):
        assert (await start(stub, sealed_item(key=SealKey(bytes(32))))).state.digest != first.state.digest
    identity = {
        "environment": "dice",
        "version": "1.0",
        "split_epoch": 1,
        "split": "all",
        "options": {"faces": 6, "worlds": 1_000_000},
        "limits": {"max_turns": 20, "max_actions": 30, "max_actions_per_turn": 3, "wall_seconds": None},
        "sealed": KEY.digest_salt(DICE_BOARD, SEEDS),
    }
    expected = first_digest(canonical_json(identity), SEEDS.noise_seed, first.state.observation)
    assert first.state.digest == expected


async def test_the_salt_is_keyed():
    salts = {
        KEY.digest_salt(DICE_BOARD, SEEDS),
        SealKey(bytes(32)).digest_salt(DICE_BOARD, SEEDS),
        KEY.digest_salt(replace(DICE_BOARD, split="train"), SEEDS),
        KEY.digest_salt(DICE_BOARD, replace(SEEDS, level_seed=0)),
        KEY.digest_salt(DICE_BOARD, replace(SEEDS, noise_seed=0)),
    }
    assert len(salts) == 5
    assert all(len(bytes.fromhex(salt)) == 32 for salt in salts)


async def test_copies_and_advice_are_refused():
    async with serving(DICE, seal_key=KEY) as (stub, _):
        session_id = (await start(stub, sealed_item())).session_id
        fork = pb.ForkItem(request_id=os.urandom(16), session_id=session_id, same_noise=True)
        (forked,) = (await stub.Fork(pb.ForkRequest(items=[fork]))).outcomes
        assert reason(forked) == "SEALED"
        (advised,) = (await stub.Advise(pb.AdviseRequest(items=[pb.AdviseItem(session_id=session_id)]))).outcomes
        assert reason(advised) == "SEALED"
        assert (await step(stub, session_id, 1, "roll")).HasField("transition")


async def test_what_cannot_be_opened_is_refused():
    async with serving(DICE, seal_key=KEY) as (stub, _):
        other_board = sealed_item()
        other_board.sealed_seed = KEY.seal(replace(DICE_BOARD, split="train"), SEEDS)
        other_options = sealed_item()
        other_options.options_json = '{"faces":5}'
        noisy = sealed_item()
        noisy.noise_seed = 3
        for item, expected in (
            (other_board, "SEALED"),
            (other_options, "SEALED"),
            (sealed_item(key=SealKey(bytes(32))), "SEALED"),
            (noisy, "INVALID_ITEM"),
        ):
            assert reason(await reset_error(stub, item)) == expected
    async with serving(DICE) as (stub, _):
        error = await reset_error(stub, sealed_item())
        assert (reason(error), "--seal-key" in error.message) == ("SEALED", True)


async def test_a_sealed_episode_is_resumed_from_its_sealed_seed():
    async with serving(DICE, seal_key=KEY) as (stub, _):
        first = await start(stub, sealed_item())
        played = [(await step(stub, first.session_id, turn, "roll")).transition for turn in (1, 2, 3)]
    turns = [pb.Actions(actions=["roll"])] * 2
    async with serving(DICE, seal_key=KEY) as (stub, _):
        resumed = await start(stub, sealed_item(resume=pb.Resume(turns=turns, digest=played[1].digest)))
        assert (resumed.step_index, resumed.state.digest) == (2, played[1].digest)
        assert (resumed.level_seed, list(resumed.noise)) == (0, [])
        assert (await step(stub, resumed.session_id, 3, "roll")).transition == played[2]
        noise = [pb.NoiseSegment(from_step=1, noise_seed=SEEDS.noise_seed)]
        for resume, expected in (
            (pb.Resume(turns=turns, digest=played[1].digest, noise=noise), "INVALID_ITEM"),
            (pb.Resume(turns=turns[:1], digest=played[1].digest), "DIGEST_MISMATCH"),
        ):
            error = await reset_error(stub, sealed_item(resume=resume))
            assert reason(error) == expected
            assert not leaks(error.message)


async def test_a_train_token_plays_no_sealed_seed(tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", train="train", evaluate="evaluate", admin="admin")
    async with serving(DICE, seal_key=KEY, tokens=tmp_path / "tokens.toml") as (stub, _):
        for role, metadata in tokens.items():
            item = reset_item(level_seed=None, noise_seed=None, split=pb.SPLIT_TRAIN)
            item.sealed_seed = KEY.seal(replace(DICE_BOARD, split="train"), SEEDS)
            (outcome,) = (await stub.Reset(pb.ResetRequest(items=[item]), metadata=metadata)).outcomes
            if role == "train":
                assert reason(outcome) == "NOT_PERMITTED"
                assert details(outcome.error)[0].metadata["role"] == "train"
            else:
                assert outcome.HasField("started")


def leaks(text: str) -> list[str]:
    """Seeds, in the ways in which they might be written, that `text` holds."""
    numbers = (SEEDS.level_seed, SEEDS.noise_seed, 3_000_000_001)
    return [form for number in numbers for form in (str(number), f"{number:x}") if form in text]


async def test_neither_errors_nor_logs_show_seeds_or_what_the_environment_said(tmp_path, caplog):
    (tmp_path / "levels").write_text("5 3 9")
    levels = EnvironmentHost(LEVELS, {"levels": tmp_path / "levels"})
    levels_board = Board("levels", levels.resolve_options("").json, "all")
    raising_board = replace(FAULTY_BOARD, options_json='{"reset":"raise","told":""}')
    few_board = Board("dice", '{"faces":6,"worlds":1}', "held_out")
    caplog.set_level(logging.DEBUG)
    async with serving(DICE, FAULTY, levels, seal_key=KEY) as (stub, _):
        told = []
        for item, expected in (
            (sealed_item(levels_board, seeds=Seeds(3_000_000_001, SEEDS.noise_seed)), "NO_SUCH_INSTANCE"),
            (sealed_item(few_board, split=pb.SPLIT_HELD_OUT), "NO_SUCH_INSTANCE"),
            (sealed_item(raising_board), "ENVIRONMENT_FAILED"),
        ):
            error = await reset_error(stub, item)
            assert reason(error) == expected
            told.append(error)
        failing = await start(stub, sealed_item(FAULTY_BOARD))
        failed = (await step(stub, failing.session_id, 1, "raise")).error
        assert failed.message == "faulty failed in step 1: KeyError"
        assert told[-1].message == "faulty failed in a reset: RuntimeError"
        for error in (*told, failed):
            assert not leaks(str(error))
        name = hashlib.sha256(item.sealed_seed).hexdigest()[:16]
        await stub.Close(pb.CloseRequest(session_ids=[failing.session_id]))
    lines = [formatter().format(record) for record in caplog.records for formatter in (TextFormatter, JsonFormatter)]
    assert any(f"sealed seed {name}" in line for line in lines)
    assert name in {json.loads(line).get("sealed") for line in lines[1::2]}
    for line in lines:
        assert not leaks(line), line


class Telltale(Dice):
    """Fails where it is told to, and says where it was."""

    fails = ""

    def tell(self, where: str) -> None:
        if where == self.fails:
            told = ValueError(f"SECRETWORLD{self.target}")
            told.add_note(f"SECRETWORLD{self.target}")
            raise told from KeyError(f"SECRETWORLD{self.target}")

    def reset(self, level: Rng) -> Start:
        start = super().reset(level)
        self.tell("reset")
        if self.fails == "no instance":
            raise NoInstance(f"SECRETWORLD{self.target}")
        return start

    def step(self, action: str, noise: Rng) -> ActionResult:
        self.tell("step")
        return super().step(action, noise)

    def legal_actions(self) -> Sequence[str] | None:
        self.tell("legal")
        return super().legal_actions()

    def oracle(self, left: Left) -> Sequence[str] | None:
        self.tell("oracle")
        return super().oracle(left)

    def close(self) -> None:
        self.tell("close")


def quotes(text: str) -> bool:
    """Whether a text holds what Telltale says, and not only the line of its source."""
    return bool(re.search(r"SECRETWORLD\d", text))


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("fails", ["reset", "no instance", "step", "legal", "close"])
async def test_no_exception_of_a_sealed_session_is_quoted(fails, inline, caplog, monkeypatch):
    spec = make_spec("telltale", Telltale, DiceOptions, inline=inline)
    board = replace(DICE_BOARD, environment_id="telltale")
    monkeypatch.setattr(Telltale, "fails", fails)
    for seal in (True, False):
        caplog.clear()
        replies = []
        async with serving(spec, seal_key=KEY) as (stub, _):
            item = sealed_item(board) if seal else reset_item("telltale", options_json=board.options_json)
            reply = await stub.Reset(pb.ResetRequest(items=[item], want_legal_actions=True))
            replies.append(reply)
            if session_id := reply.outcomes[0].started.session_id:
                replies.append(await step(stub, session_id, 1, "roll", want_legal_actions=True))
                await stub.Close(pb.CloseRequest(session_ids=[session_id]))
        lines = [form().format(record) for record in caplog.records for form in (TextFormatter, JsonFormatter)]
        if fails != "no instance":
            assert any("ValueError" in line and "KeyError" in line and "in tell" in line for line in lines)
            assert any(quotes(line) for line in lines) != seal
        if seal:
            for text in (*map(str, replies), *lines):
                assert not quotes(text)


@pytest.mark.parametrize("seal", [True, False])
async def test_the_frames_of_an_isolated_environment_are_shown(seal, caplog):
    async with serving(replace(FAULTY, isolation=Isolation()), seal_key=KEY) as (stub, _):
        item = sealed_item(FAULTY_BOARD) if seal else reset_item("faulty")
        session_id = (await start(stub, item)).session_id
        failed = await step(stub, session_id, 1, "quote", max_wait_seconds=20)
        assert reason(failed) == "ENVIRONMENT_FAILED"
    (record,) = [record for record in caplog.records if record.exc_info]
    for form in (TextFormatter, JsonFormatter):
        line = form().format(record)
        assert re.search(r'sample_environments\.py\\?", line \d+, in step', line)
        assert all(name in line for name in ("ValueError", "KeyError", "direct cause"))
        assert quotes(line) != seal


@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("what", ["the oracle", "a fork"])
async def test_nor_is_one_beside_the_turns(what, seal, caplog, monkeypatch):
    """Sealed sessions refuse oracle and forks; were they to allow them, what these raise would not be quoted either."""
    monkeypatch.setattr(Telltale, "fails", "oracle")
    spec = make_spec("telltale", Telltale, DiceOptions)
    async with serving(spec, seal_key=KEY) as (stub, server):
        board = replace(DICE_BOARD, environment_id="telltale")
        item = sealed_item(board) if seal else reset_item("telltale")
        await start(stub, item)
        session = next(iter(server.service.table.living))
        with pytest.raises(ItemError) as failed:
            await session._aside(lambda: lambda: session.episode.environment.oracle(None), what)
    (line,) = [record for record in caplog.records if record.exc_info]
    for form in (TextFormatter, JsonFormatter):
        assert quotes(form().format(line)) != seal
    assert quotes("".join(traceback.format_exception(failed.value))) != seal
