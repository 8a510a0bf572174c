"""The conformance kit: our server passes, and a server with a defect is told which rule it breaks."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence

import broken_server
import grpc
import pytest
from broken_server import Passthrough, in_front_of
from certificates import Authority
from sample_environments import THREADED_DICE, Dice, DiceOptions, make_spec
from server_process import ServerProcess
from serving import serving
from token_files import write_tokens

from turngym_server.conformance import Finding, Verdict, check, expect
from turngym_server.conformance.__main__ import main
from turngym_server.conformance.connection import Connection, code_name, dial
from turngym_server.conformance.rule import RULES
from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY, Determinism, Left
from turngym_server.errors import CODES
from turngym_server.splits import Split


class CountedDice(Dice):
    """Dice whose worlds are many enough to be divided into splits."""

    @classmethod
    def world_count(cls, options: DiceOptions) -> int | None:
        return options.worlds


class SilentDice(Dice):
    """Dice that name no legal action and no best one."""

    def legal_actions(self) -> Sequence[str] | None:
        return None

    def oracle(self, left: Left) -> Sequence[str] | None:
        return None


DICE = make_spec("dice", CountedDice, DiceOptions)
SILENT_DICE = make_spec("silent_dice", SilentDice, DiceOptions, determinism=Determinism.NONE)
COMMAND = [sys.executable, "-m", "turngym_server.conformance"]
DEFECTS = [
    (broken_server.PlaysDuplicates, "Step: sending the last index again with the same actions must return the stored"),
    (broken_server.ForgetsRequestIds, "Reset: the same request id and item again must return the same session"),
    (broken_server.AnswersAsTheyCome, "Step: outcomes must come in the order of the items"),
    (broken_server.RewardsNaN, "Step: rewards, reward components and metrics must never be NaN or infinite"),
    (broken_server.DigestsSomethingElse, "Step: each digest must be d_t as environment.proto defines it"),
    (broken_server.SucceedsEarly, "Step: success must be set only at the end"),
    (broken_server.DrawsItsOwnSeeds, "Determinism: the same seeds and actions must give the same start"),
    (broken_server.FailsAsAWhole, "Step: outcomes must come in the order of the items"),
    (broken_server.ParsesAsAWhole, "Step: one item of 64 whose text is no UTF-8 must be INVALID_ARGUMENT"),
    (broken_server.ForksShareState, "Fork: what is played in the copy must not be felt in the original"),
    (broken_server.AdviceDisturbs, "Advise: an episode that is advised must go on as one that is not"),
    (broken_server.MixesUpRequests, "StepStream: the same step in many requests at once must be played once"),
    (
        broken_server.EndsStreamsAtErrors,
        "StepStream: a request that is refused as a whole must be answered",
    ),
    (broken_server.EndsTwice, "Step: terminated and truncated must exclude each other"),
    (broken_server.SaysNotWhy, "Errors: each must carry google.rpc.ErrorInfo"),
    (broken_server.MixesSplits, "Splits: a world's split must be that of its id"),
]
NEVER_CHECKED_HERE = {
    "calls_without_a_token",
    "sessions_of_another_token",
    "tools_are_described",
    "listed_addresses_answer",
    "expired_sessions",
}
"""Rules that the environments and the server of the test give no occasion for."""


async def findings(address: str, *ids: str, words: str = "") -> list[Finding]:
    def ask() -> list[Finding]:
        with dial(address) as channel:
            return list(check(Connection(channel), ids, words))

    return await asyncio.to_thread(ask)


def of(found: list[Finding], verdict: Verdict) -> list[str]:
    return [str(finding) for finding in found if finding.verdict is verdict]


async def run(*arguments: str) -> tuple[int, str, str]:
    """The command's exit status, and what it printed."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=PIPE, stderr=PIPE)
    stdout, stderr = await asyncio.wait_for(process.communicate(), timeout=60)
    return process.returncode, stdout.decode(), stderr.decode()


async def test_our_server_passes():
    load_own()
    specs = (DICE, THREADED_DICE, SILENT_DICE, REGISTRY["bandit"], REGISTRY["sokoban"])
    async with serving(*specs, max_sessions=200) as (_, server):
        found = await findings(server.address, *(spec.id for spec in specs))
        assert of(found, Verdict.FAILS) == []
        assert {finding.rule.name for finding in found} == {rule.name for rule in RULES}
        assert server.service.table.held == 0
    checked = {finding.rule.name for finding in found if finding.verdict is Verdict.HOLDS}
    assert {rule.name for rule in RULES} - checked == NEVER_CHECKED_HERE


def test_the_kit_knows_every_reason():
    assert {reason.value: code_name(code) for reason, code in CODES.items()}.items() <= expect.CODES.items()


async def test_a_server_of_few_splits_and_short_leases_passes():
    async with serving(DICE, splits={Split.TRAIN}, lease_seconds=1.0) as (_, server):
        for words in ("Splits:", "Leases:"):
            found = await findings(server.address, "dice", words=words)
            assert of(found, Verdict.FAILS) == []
        assert of(found, Verdict.HOLDS)


async def test_a_server_of_tokens_passes(tmp_path):
    bearers = write_tokens(tmp_path / "tokens", ann="train", bob='role = "evaluate"\nrequests_per_second = 1000')
    async with serving(DICE, tokens=tmp_path / "tokens") as (_, server):

        def ask(words: str) -> list[Finding]:
            with dial(server.address) as channel:
                connection = Connection(channel, bearers["ann"], other_metadata=bearers["bob"])
                return list(check(connection, ["dice"], words))

        access = await asyncio.to_thread(ask, "Access:")
        assert [finding.verdict for finding in access] == [Verdict.HOLDS] * 2
        for words in ("Splits:", "sealed"):
            assert of(await asyncio.to_thread(ask, words), Verdict.FAILS) == []


async def test_what_a_quota_keeps_the_kit_from_is_skipped(tmp_path):
    bearers = write_tokens(tmp_path / "tokens", ann='role = "train"\nmax_sessions = 2')
    async with serving(DICE, tokens=tmp_path / "tokens") as (_, server):

        def ask() -> list[Finding]:
            with dial(server.address) as channel:
                return list(check(Connection(channel, bearers["ann"], patience=0.0), ["dice"], "all differ"))

        (finding,) = await asyncio.to_thread(ask)
    assert finding.verdict is Verdict.SKIPPED
    assert "SESSION_LIMIT" in finding.detail


async def test_a_server_of_four_workers_passes():
    with ServerProcess("--env", "frozen_lake", "--workers", "4", "--max-sessions", "400") as server:
        found = await findings(server.address, "frozen_lake")
        assert of(found, Verdict.FAILS) == []
        assert "listed_addresses_answer" in {finding.rule.name for finding in found if finding.verdict is Verdict.HOLDS}
        with dial(server.address) as channel:
            *_, worker = Connection(channel).get_server().addresses
        streamed = await findings(worker, "frozen_lake", words="StepStream")
        assert {finding.verdict for finding in streamed} == {Verdict.HOLDS}


async def test_a_proxy_without_defect_passes():
    async with serving(DICE, max_sessions=200) as (_, server), in_front_of(server.address, Passthrough) as address:
        assert of(await findings(address, "dice"), Verdict.FAILS) == []


@pytest.mark.parametrize(("defect", "words"), DEFECTS, ids=[defect.__name__ for defect, _ in DEFECTS])
async def test_a_defect_is_found(defect, words):
    async with serving(DICE) as (_, server), in_front_of(server.address, defect) as address:
        (failure,) = await findings(address, "dice", words=words)
        (right,) = await findings(server.address, "dice", words=words)
    assert (failure.verdict, right.verdict) == (Verdict.FAILS, Verdict.HOLDS), (failure, right)
    assert failure.detail


async def test_the_command(tmp_path):
    token = tmp_path / "token"
    token.write_text("not-needed-here\n")
    async with serving(DICE, max_sessions=200) as (_, server):
        status, printed, errors = await run(server.address, "--token-file", str(token), "--rule", "Reset:", "--verbose")
        assert (status, errors) == (0, "")
        assert (
            "holds   dice: Reset: the same request id and item again must return the same session and start\n"
            in printed
        )
        assert " 0 fail, " in printed
        async with in_front_of(server.address, broken_server.EndsTwice) as address:
            status, printed, _ = await run(address, "--env", "dice", "--rule", "terminated and truncated")
            assert status == 1
            assert printed == (
                "fails   dice: Step: terminated and truncated must exclude each other; turn 1 is both\n"
                f"{address} with dice: 0 hold, 1 fail, 0 skipped\n"
            )


async def test_what_differs_is_named():
    async with serving(DICE) as (_, server), in_front_of(server.address, broken_server.DrawsItsOwnSeeds) as address:
        (finding,) = await findings(address, "dice", words="Determinism: the same seeds and actions")
    digest = "[0-9a-f]{64}"
    expected = f"the start differs in digest, which is {digest}, expected {digest}"
    assert re.fullmatch(expected, finding.detail), finding.detail


async def test_the_command_over_mutual_tls(tmp_path):
    authority = Authority()
    ours, theirs = authority.issue("kit"), authority.issue("server")
    for name, pem in (("ca", authority.pem), ("key", ours[0]), ("cert", ours[1])):
        (tmp_path / name).write_bytes(pem)
    tls = ("--tls-ca", str(tmp_path / "ca"))
    mutual = (*tls, "--tls-key", str(tmp_path / "key"), "--tls-cert", str(tmp_path / "cert"))
    credentials = grpc.ssl_server_credentials([theirs], authority.pem, require_client_auth=True)
    async with serving(DICE) as (_, server), in_front_of(server.address, Passthrough, credentials) as address:
        status, printed, errors = await run(address, *mutual, "--rule", "Close:")
        assert (status, errors) == (0, "")
        assert printed.endswith(" 4 hold, 0 fail, 0 skipped\n")
        for too_little in (tls, ()):
            status, _, errors = await run(address, *too_little)
            assert status == 2
            assert "UNAVAILABLE" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:1"], "UNAVAILABLE"),
        ([], "HOST:PORT"),
        (["SERVER", "--env", "dise"], "did you mean 'dice'?"),
        (["SERVER", "--rule", "nothing of the kind"], "nothing of the kind"),
        (["SERVER", "--token-file", "/no/such/file"], "/no/such/file"),
        (["SERVER", "--tls-ca", "/no/such/file"], "/no/such/file"),
        (["SERVER", "--tls-cert", "/no/such/file"], "--tls-key"),
        (["SERVER", "--evn", "dice"], "--evn"),
    ],
)
async def test_wrong_arguments(arguments, words, capsys):
    async with serving(DICE) as (_, server):
        given = [server.address if each == "SERVER" else each for each in arguments]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, given)
    printed, errors = capsys.readouterr()
    assert (ended.value.code, printed) == (2, "")
    assert words in errors
    assert errors.startswith("conformance: ")
    assert errors.count("\n") == 1
