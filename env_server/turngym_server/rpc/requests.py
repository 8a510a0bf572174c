"""Reads what callers ask for: checks the items of Reset and Fork and turns them into plans.

Knows nothing of sessions.
"""

import hashlib
import math
import secrets
from collections.abc import Collection, Mapping
from typing import Final

from google.protobuf.message import Message

from turngym.sealed import Board, CannotOpen, Seal, SealKey, Seeds
from turngym.v1 import environment_pb2 as pb
from turngym_server.access.roles import Role
from turngym_server.environment import Determinism
from turngym_server.errors import ItemError, Reason
from turngym_server.host import EnvironmentHost, Plan, RequestedLimits, ResolvedOptions, did_you_mean, nearest
from turngym_server.rpc import messages
from turngym_server.sessions.episode import NoiseSegment
from turngym_server.splits import Split

REQUEST_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
MAX_WAIT_SECONDS: Final = 60.0
"""The longest that a caller can have a reply held back."""
DEFAULT_WAIT_SECONDS: Final = 10.0
MAX_RESUME_ACTIONS: Final = 80_000
MAX_RESUME_BYTES: Final = 16 * 1024 * 1024
MAX_RESUME_SEGMENTS: Final = 4_096
"""What one episode may bring along to be played again. Eight times the actions that environments let an episode run, as
those that were left out count too; a request has room for as many bytes and what is around them."""


def find_host(hosts: Mapping[str, EnvironmentHost], environment_id: str) -> EnvironmentHost:
    """The environment of that id.

    Raises:
        ItemError: UNKNOWN_ENVIRONMENT.
    """
    host = hosts.get(environment_id)
    if host is None:
        close = nearest(environment_id, hosts)
        raise ItemError(
            Reason.UNKNOWN_ENVIRONMENT,
            f"no environment {environment_id[:100]!r} here{did_you_mean(close)} Served: {', '.join(sorted(hosts))}.",
            metadata={"nearest": close},
        )
    return host


def item_fingerprint(item: Message) -> bytes:
    """Stands for an item where only equality matters."""
    return hashlib.sha256(item.SerializeToString(deterministic=True)).digest()


def check_request_id(request_id: bytes) -> None:
    if len(request_id) != REQUEST_ID_BYTES:
        raise _invalid(f"request_id of {len(request_id)} bytes; expected {REQUEST_ID_BYTES} random ones")


def wait_seconds(asked: float) -> float:
    """How long a reply may be held back.

    Raises:
        ItemError: INVALID_ITEM.
    """
    if not math.isfinite(asked) or asked < 0:
        raise _invalid(f"max_wait_seconds {asked}; expected a finite number, 0 (the server's own) or more")
    return min(asked, MAX_WAIT_SECONDS) if asked else DEFAULT_WAIT_SECONDS


def requested_limits(limits: pb.Limits) -> RequestedLimits:
    return RequestedLimits(
        max_turns=limits.max_turns,
        max_actions=limits.max_actions,
        max_actions_per_turn=limits.max_actions_per_turn,
        wall_seconds=limits.wall_seconds,
    )


def find_host_of_reset(hosts: Mapping[str, EnvironmentHost], item: pb.ResetItem) -> EnvironmentHost:
    """The environment that a Reset item asks for, in the version that it expects.

    Raises:
        ItemError: UNKNOWN_ENVIRONMENT or VERSION_MISMATCH.
    """
    host = find_host(hosts, item.environment_id)
    spec = host.spec
    if item.expected_version and item.expected_version != spec.version:
        raise ItemError(
            Reason.VERSION_MISMATCH,
            f"{spec.id} is served in version {spec.version}; expected {item.expected_version[:100]!r}",
            metadata={"served": spec.version, "expected": item.expected_version[:100]},
        )
    return host


def read_reset(
    item: pb.ResetItem,
    host: EnvironmentHost,
    options: ResolvedOptions,
    offered: Collection[Split],
    seal_key: SealKey | None = None,
    withheld_from: Role | None = None,
) -> Plan:
    """What a Reset item asks for, with the seeds it leaves open drawn, and a sealed one opened.

    Args:
        options: those of the item.
        offered: splits that the caller may meet. withheld_from: its role, where that never meets a held-out world.

    Raises:
        ItemError: whatever can be told without starting the environment.
    """
    spec = host.spec
    limits = requested_limits(item.limits)
    resolved = host.resolve_limits(limits)
    split = _served_split(item.split, host, options, offered)
    seeds, seal = _unsealed(item, Board(spec.id, options.json, split.value), seal_key)
    if not item.HasField("resume"):
        seeds = seeds or Seeds(
            level_seed=item.level_seed if item.HasField("level_seed") else host.draw_level_seed(split, withheld_from),
            noise_seed=item.noise_seed if item.HasField("noise_seed") else secrets.randbits(64),
        )
        return Plan(
            options=options,
            limits=limits,
            split=split,
            level_seed=seeds.level_seed,
            noise=(NoiseSegment(1, seeds.noise_seed),),
            seal=seal,
            withheld_from=withheld_from,
            drawn=seal is None and not item.HasField("level_seed"),
        )
    if spec.determinism is not Determinism.BYTES:
        raise ItemError(
            Reason.NOT_REPLAYABLE,
            f"{spec.id} does not promise the same bytes again, so its episodes cannot be resumed by replay",
        )
    if item.HasField("noise_seed"):
        raise _invalid("noise_seed together with resume, which has its own noise")
    if seeds is None and not item.HasField("level_seed"):
        raise _invalid("resume without level_seed or sealed_seed")
    if seeds is not None and item.resume.noise:
        raise _invalid("resume with noise together with sealed_seed, which holds the noise")
    return Plan(
        options=options,
        limits=limits,
        split=split,
        level_seed=seeds.level_seed if seeds else item.level_seed,
        noise=(NoiseSegment(1, seeds.noise_seed),) if seeds else _noise(item.resume),
        turns=_turns(item.resume, max(resolved.max_turns, spec.caps.max_turns)),
        digest=_digest(item.resume.digest),
        seal=seal,
        withheld_from=withheld_from,
    )


def _unsealed(item: pb.ResetItem, board: Board, key: SealKey | None) -> tuple[Seeds, Seal] | tuple[None, None]:
    """The seeds in an item's sealed seed, and what stands for them; None where it has none."""
    if not item.HasField("sealed_seed"):
        return None, None
    if key is None:
        raise ItemError(Reason.SEALED, "this server opens no sealed seeds; its operator gives it --seal-key")
    if item.HasField("noise_seed"):
        raise _invalid("noise_seed together with sealed_seed, which holds the noise")
    try:
        return key.open(board, item.sealed_seed)
    except CannotOpen as error:
        raise ItemError(Reason.SEALED, f"the sealed seed cannot be opened: {error}") from error


def _served_split(
    number: pb.Split.ValueType, host: EnvironmentHost, options: ResolvedOptions, offered: Collection[Split]
) -> Split:
    split = messages.SPLIT_OF_NUMBER.get(number)
    if split is None:
        raise _invalid(f"split {number} is not in the contract")
    served = host.splits(options, offered)
    if split not in served:
        names = ", ".join(each.value for each in served)
        reason = "" if options.divides else "; with these options it has too few worlds to divide into splits"
        raise ItemError(
            Reason.SPLIT_NOT_SERVED,
            f"split {split.value} of {host.spec.id} is not served here; served: {names}{reason}",
            metadata={"served": names},
        )
    return split


def _turns(resume: pb.Resume, most: int) -> tuple[tuple[str, ...], ...]:
    if len(resume.turns) > most:
        raise _invalid(f"resume with {len(resume.turns)} turns; no episode has more than {most}")
    turns = tuple(tuple(turn.actions) for turn in resume.turns)
    for step_index, actions in enumerate(turns, start=1):
        if not actions:
            raise _invalid(f"resume with no actions in turn {step_index}; expected at least one")
    if (count := sum(map(len, turns))) > MAX_RESUME_ACTIONS:
        raise _invalid(f"resume with {count} actions; an episode of more than {MAX_RESUME_ACTIONS} cannot be resumed")
    # Of the message, so that no text is encoded again: each action takes a few bytes beside its own.
    if (size := resume.ByteSize()) > MAX_RESUME_BYTES:
        raise _invalid(f"resume of {size} bytes; an episode of more than {MAX_RESUME_BYTES} cannot be resumed")
    return turns


def _noise(resume: pb.Resume) -> tuple[NoiseSegment, ...]:
    if (count := len(resume.noise)) > MAX_RESUME_SEGMENTS:
        raise _invalid(
            f"resume with {count} noise segments; an episode of more than {MAX_RESUME_SEGMENTS} cannot be resumed"
        )
    segments = tuple(NoiseSegment(segment.from_step, segment.noise_seed) for segment in resume.noise)
    steps = [segment.from_step for segment in segments]
    last = len(resume.turns) + 1
    if not steps or steps[0] != 1 or steps != sorted(steps) or steps[-1] > last:
        raise _invalid(
            f"resume with noise from steps {steps[:20]}; expected the first from step 1, then ascending, "
            f"none after {last}, the step to be played next"
        )
    return segments


def _digest(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise _invalid(f"resume with a digest of {len(digest)} bytes; expected {DIGEST_BYTES}")
    return digest


def _invalid(message: str) -> ItemError:
    return ItemError(Reason.INVALID_ITEM, message)
