"""Rules about splits and the names of worlds and instances."""

from __future__ import annotations

from collections.abc import Collection

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import chain, expect
from turngym_server.conformance.probe import NOISE_SEED, Probe
from turngym_server.conformance.rule import NotApplicable, Violation, rule

SAMPLE = 48
"""Instances of each split that rules look at."""
PARTS = (pb.SPLIT_TRAIN, pb.SPLIT_VALIDATION, pb.SPLIT_HELD_OUT)


def _served(probe: Probe) -> Collection[pb.Split.ValueType]:
    return {info.split for info in probe.spec.splits if info.served}


def _worlds(probe: Probe, split: pb.Split.ValueType) -> list[str]:
    """World ids of a sample of a split."""
    size = min(SAMPLE, probe.server.max_batch_items)
    items = [probe.item(split=split, level_seed=None) for _ in range(size)]
    worlds = [episode.started.world_id for episode in probe.start_items(items, want_legal_actions=False)]
    probe.close_sessions()
    return worlds


@rule
def splits_that_are_not_served(probe: Probe) -> None:
    """Splits: one that is not served must be PERMISSION_DENIED, and served ones must be named in the metadata."""
    served = _served(probe)
    others = [split for split in chain.SPLIT_NAMES if split not in served]
    if not others:
        raise NotApplicable("every split is served")
    names = {chain.SPLIT_NAMES[split] for split in served}
    for split in others:
        outcome = probe.reset([probe.item(split=split)])[0]
        expect.refused(outcome, "SPLIT_NOT_SERVED")
        named = {name.strip() for name in expect.metadata(outcome.error).get("served", "").split(",")}
        expect.same(named, names, "`served` in the metadata")


@rule
def splits_that_are_served(probe: Probe) -> None:
    """Splits: one that is listed as served must start, and be the one in the reply."""
    for split in _served(probe):
        outcome = probe.reset([probe.item(split=split, level_seed=None)])[0]
        expect.same(expect.started(outcome).split, split, "the split")


@rule
def no_split_is_train(probe: Probe) -> None:
    """Splits: an item without a split must be one of TRAIN."""
    outcome = probe.reset([probe.item(split=pb.SPLIT_UNSPECIFIED, level_seed=None)])[0]
    if pb.SPLIT_TRAIN in _served(probe):
        expect.same(expect.started(outcome).split, pb.SPLIT_TRAIN, "the split")
    else:
        expect.refused(outcome, "SPLIT_NOT_SERVED")


@rule
def splits_share_no_world(probe: Probe) -> None:
    """Splits: no world may be met in two of TRAIN, VALIDATION and HELD_OUT."""
    parts = [split for split in PARTS if split in _served(probe)]
    if len(parts) < 2:
        raise NotApplicable("fewer than two of TRAIN, VALIDATION and HELD_OUT are served")
    seen: dict[str, pb.Split.ValueType] = {}
    for split in parts:
        for world in _worlds(probe, split):
            if seen.setdefault(world, split) != split:
                names = f"{chain.SPLIT_NAMES[seen[world]]} and {chain.SPLIT_NAMES[split]}"
                raise Violation(f"world {world} was met in {names}, among {SAMPLE} instances of each")


@rule
def worlds_belong_to_their_split(probe: Probe) -> None:
    """Splits: a world's split must be that of its id, as environment.proto defines it."""
    parts = [split for split in PARTS if split in _served(probe)]
    if not parts:
        raise NotApplicable("none of TRAIN, VALIDATION and HELD_OUT is served")
    for split in parts:
        for world in _worlds(probe, split):
            try:
                due = chain.split_of(world)
            except ValueError as error:
                raise Violation(f"world_id {world!r} is not in hexadecimal") from error
            expect.same(chain.SPLIT_NAMES[due], chain.SPLIT_NAMES[split], f"the split of world {world}")


@rule
def names_of_instances(probe: Probe) -> None:
    """Reset: the same options, split and level seed must give the same instance and world, whatever the noise."""
    probe.needs_bytes()
    first, second = probe.start_items([probe.item(), probe.item(noise_seed=NOISE_SEED + 1)])
    for name in ("instance_id", "world_id"):
        expect.true(bool(getattr(first.started, name)), f"{name} is empty")
        expect.same(getattr(second.started, name), getattr(first.started, name), name)
    expect.same(second.state.observation, first.state.observation, "the observation")
