"""What strangers may send as a checkpoint: hostile and broken folders are refused in a sentence, sound ones taken."""

import json
import os
import pickle
import re
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from turngym_leaderboard.intake import IntakeLimits, Refused, examination, names
from turngym_leaderboard.intake.examination import CannotExamine, EndedUnexpectedly, examine
from turngym_leaderboard.intake.folder import check_folder
from turngym_leaderboard.intake.trial import try_out
from turngym_trainer.policy import load_policy

LIMITS = IntakeLimits(max_bytes=1 << 24, max_parameters=2_000_000)


class Payload:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self):
        return Path.touch, (self._witness,)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("intake") / "sound"
    load_policy("tiny").save(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    """A copy of a sound checkpoint, to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "checkpoint"))


def edit(file: Path, **changes: object) -> None:
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, **changes}))


def header_of(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_weights(file: Path, header: dict | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def with_header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Spoils the header of the weights in place."""

    def spoil(folder: Path) -> None:
        header, data = header_of(folder / names.WEIGHTS)
        change(header)
        write_weights(folder / names.WEIGHTS, header, data)

    return spoil


def with_weights(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / names.WEIGHTS)
        change(tensors)
        save_file(tensors, folder / names.WEIGHTS)

    return spoil


def with_config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: edit(folder / names.CONFIG, **changes)


def pickled(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Payload(folder.parent / "witness")))


def poison(value: float) -> Callable[[dict[str, np.ndarray]], object]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][-1] = value

    return change


def in_shards(
    folder: Path, *, index: Callable[[dict[str, str]], dict[str, str]] = lambda weight_map: weight_map
) -> None:
    """Divides the weights into two files and an index."""
    tensors = load_file(folder / names.WEIGHTS)
    (folder / names.WEIGHTS).unlink()
    files = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for file, half in zip(files, halves, strict=True):
        save_file(half, folder / file)
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (folder / names.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index(weight_map)}))


def elsewhere(weight_map: dict[str, str]) -> dict[str, str]:
    return {**weight_map, "model.norm.weight": "../../other/model.safetensors"}


def link_weights(folder: Path) -> None:
    (folder / names.WEIGHTS).rename(folder.parent / "weights")
    (folder / names.WEIGHTS).symlink_to(folder.parent / "weights")


def many_tensors(header: dict) -> None:
    header |= {f"t{k}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for k in range(50_001)}


def entry(name: str, **changes: object) -> Callable[[dict], object]:
    return lambda header: header[name].update(changes)


NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"

HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickled weights beside safetensors": (pickled("pytorch_model.bin"), "pickled or other weights"),
    "a pickle named as weights": (pickled(names.WEIGHTS), "is no safetensors file"),
    "an optimiser as pickle": (pickled("training/optimizer.pt"), "pickled or other weights"),
    "code": (lambda f: (f / "modeling_evil.py").write_text("import os"), "may hold no code"),
    "an archive": (lambda f: (f / "weights.zip").write_bytes(b"PK\x03\x04"), "archives are not unpacked"),
    "a link to a file": (link_weights, "is a link or no plain file"),
    "a link to a folder": (lambda f: (f / "training").symlink_to("/etc"), "is a link or no plain file"),
    "a pipe": (lambda f: os.mkfifo(f / "README"), "is a link or no plain file"),
    "a folder of its own": (lambda f: (f / "..secret").mkdir(), "is a folder that no checkpoint has"),
    "custom code in the model": (
        with_config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}),
        r"config.json: 'auto_map' is set, but code",
    ),
    "custom code in a part of the model": (
        with_config(text_config={"auto_map": {"AutoConfig": "evil--evil"}}),
        "'auto_map' is set, but code",
    ),
    "custom code in the tokenizer": (
        lambda f: edit(f / names.TOKENIZER_CONFIG, auto_map={"AutoTokenizer": ["evil.Evil", None]}),
        r"tokenizer_config.json: 'auto_map' is set",
    ),
    "a kernel from elsewhere": (with_config(_attn_implementation="evil/kernel"), "kernels are not fetched"),
    "weights from elsewhere": (
        with_config(transformers_weights="../../x.safetensors"),
        "'transformers_weights' is set",
    ),
    "quantised": (with_config(quantization_config={"quant_method": "gptq"}), "quantised weights are not read"),
    "a dtype that is a function": (with_config(dtype="load"), "'dtype' is 'load'; expected one of float32"),
    "a model type that is a path": (with_config(model_type="../../evil"), "model_type is missing"),
    "deep JSON": (lambda f: (f / names.CONFIG).write_text('{"a":' * 40 + "1" + "}" * 40), "nested too deeply"),
    "very deep JSON": (lambda f: (f / names.CONFIG).write_text('{"a":' * 90_000 + "1" + "}" * 90_000), "too deeply"),
    "a key twice": (lambda f: (f / names.CONFIG).write_text('{"a": 1, "a": 2}'), "'a' occurs twice"),
    "a number without end": (lambda f: (f / names.CONFIG).write_text('{"a": %s}' % ("9" * 9999)), "9999 digits"),
    "a large config": (lambda f: (f / names.CONFIG).write_text(" " * (1 << 20) + "{}"), "at most 1048576 are allowed"),
    "no JSON": (lambda f: (f / names.CONFIG).write_bytes(b"\xff\xfe"), "config.json is no JSON"),
    "a list": (lambda f: (f / names.CONFIG).write_text("[]"), "expected a JSON object"),
    "layers without weights": (with_config(num_hidden_layers=10**9), "the weights are 38 tensors"),
    "a width without weights": (with_config(hidden_size=10**9), "is more than the 783872 parameters"),
    "too large a file": (lambda f: os.truncate(f / names.WEIGHTS, 1 << 25), "at most 16777216 are allowed"),
    "cut off": (lambda f: os.truncate(f / names.WEIGHTS, 3_000_000), "but its tensors end at"),
    "a tail": (
        lambda f: (f / names.WEIGHTS).write_bytes((f / names.WEIGHTS).read_bytes() + b"x"),
        "but its tensors end at",
    ),
    "an endless header": (lambda f: write_weights(f / names.WEIGHTS, b"", b""), "is no JSON"),
    "a header longer than the file": (
        lambda f: (f / names.WEIGHTS).write_bytes(struct.pack("<Q", 1 << 63)),
        "its header would have 9223372036854775808 bytes",
    ),
    "very many tensors": (with_header(many_tensors), "holds 50039 tensors"),
    "overlapping tensors": (with_header(entry(NORM, data_offsets=[0, 512])), "without gap or overlap"),
    "an oversized tensor": (with_header(entry(NORM, shape=[10**12])), "of shape [1000000000000] takes"),
    "a shape that wraps": (with_header(entry(NORM, shape=[1 << 32, 1 << 32])), "takes 73786976294838206464"),
    "a negative size": (with_header(entry(NORM, shape=[-1, -128])), "expected at most 8 sizes over 0"),
    "a size that is true": (with_header(entry(NORM, shape=[True, 128])), "expected at most 8 sizes over 0"),
    "no size": (with_header(entry(NORM, shape=[0, 128])), "expected at most 8 sizes over 0"),
    "an unknown dtype": (with_header(entry(NORM, dtype="F4")), "has dtype 'F4'"),
    "no offsets": (
        with_header(lambda header: header[NORM].pop("data_offsets")),
        "expected dtype, shape and data_offsets",
    ),
    "NaN": (with_weights(poison(np.nan)), "'model.norm.weight' holds weights that are NaN or infinite"),
    "infinity": (with_weights(poison(-np.inf)), "'model.norm.weight' holds weights that are NaN or infinite"),
    "too many parameters": (
        with_weights(lambda tensors: tensors.update(more=np.zeros(1_300_000, np.float32))),
        "has 2083872 parameters; this board takes at most 2000000",
    ),
    "an index that leads away": (lambda f: in_shards(f, index=elsewhere), "it is in model-0000"),
    "an index that lies": (lambda f: in_shards(f, index=lambda told: {**told, "more": "x"}), "is only in the index"),
    "a shard that is missing": (
        lambda f: (in_shards(f), (f / "model-00002-of-00002.safetensors").unlink()),
        "expected model-00001-of-00001.safetensors",
    ),
    "weights twice": (lambda f: (f / names.INDEX).write_text("{}"), "send the one or the other"),
    "no weights": (lambda f: (f / names.WEIGHTS).unlink(), "there are no weights"),
    "no tokenizer": (lambda f: (f / names.TOKENIZER).unlink(), "tokenizer.json missing"),
    "another vocabulary": (with_config(vocab_size=900), "token ids up to 994, but the model's vocabulary"),
    "no vocabulary": (lambda f: edit(f / names.TOKENIZER, model={}, added_tokens=[]), "has no vocabulary"),
    "token ids below 0": (lambda f: edit(f / names.TOKENIZER, added_tokens=[{"id": -1}]), "token id '-1'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused_before_anything_of_it_is_loaded(folder, case):
    spoil, expected = HOSTILE[case]
    (folder / "training").mkdir() if case == "an optimiser as pickle" else None
    spoil(folder)
    with pytest.raises(Refused, match=re.escape(expected) if "\\" not in expected else expected) as refusal:
        check_folder(folder, LIMITS)
    assert len(str(refusal.value)) < 700
    assert "\n" not in str(refusal.value)
    assert not (folder.parent / "witness").exists()


def test_a_sound_folder_is_told(folder):
    accepted = check_folder(folder, LIMITS)
    assert (accepted.model_type, accepted.parameters, accepted.vocabulary) == ("llama", 783_872, 995)
    assert accepted.bytes == sum(file.stat().st_size for file in folder.iterdir())


def test_shards_with_their_index_are_taken(folder):
    in_shards(folder)
    assert check_folder(folder, LIMITS).parameters == 783_872


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_of_every_width_are_looked_at(folder, dtype, value):
    """The last of the largest tensor, which is read in several parts where it is of doubles."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[EMBEDDING] = np.tile(tensors[EMBEDDING].astype(dtype), (9, 1))
        tensors[EMBEDDING][-1, -1] = value

    with_weights(change)(folder)
    with pytest.raises(Refused, match="NaN or infinite"):
        check_folder(folder, IntakeLimits())


def test_finite_extremes_are_no_infinity(folder):
    extremes = np.finfo(np.float32)
    with_weights(lambda tensors: tensors[NORM].put([0, 1, 2], [extremes.max, extremes.min, extremes.tiny]))(folder)
    check_folder(folder, LIMITS)


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "/etc/passwd",
        "a/../../config.json",
        "training\\state.json",
        "Config.json",
        "config.json\n",
        "training/critic.safetensors",
        "model-1-of-2.safetensors",
        "model-٠٠٠٠١-of-00002.safetensors",
        "",
        "con\0fig.json",
    ],
)
def test_only_listed_names_are_allowed(name):
    assert names.name_fault(name)


def test_what_is_not_needed_is_not_sent(folder):
    training = folder / "training"
    training.mkdir()
    (training / "state.json").write_text("{}")
    (training / "critic.safetensors").write_bytes(b"x")
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / "special_tokens_map.json").symlink_to(folder / "config.json")
    taken, left = names.files_to_send(folder)
    assert names.TRAINED in taken
    assert set(names.REQUIRED) < set(taken)
    assert left == ["optimizer.pt", "special_tokens_map.json", "training/critic.safetensors"]


def tried(folder: Path, limits: IntakeLimits = LIMITS) -> None:
    try_out(folder, check_folder(folder, limits), limits, "cpu")


LOADS_BADLY: dict[str, tuple[Callable[[Path], object], str]] = {
    "an architecture that nobody knows": (
        with_config(model_type="evil"),
        "no causal language model of the transformers",
    ),
    "no language model": (with_config(model_type="vit"), "no causal language model of the transformers"),
    "an activation that is none": (with_config(hidden_act="evil"), "transformers cannot load the checkpoint: KeyError"),
    "weights that are missing": (
        with_weights(lambda tensors: tensors.pop(NORM)),
        "no weights for model.norm.weight, which transformers would draw at random",
    ),
    "weights of other sizes": (
        with_weights(lambda t: t.update({NORM: np.ones(64, np.float32)})),
        "model.norm.weight of shape [128]",
    ),
    "a wide middle": (with_config(intermediate_size=1 << 24), "describes a model of 25770"),
    "no chat template": (lambda f: (f / names.CHAT_TEMPLATE).unlink(), "has no chat template"),
    "a chat template that reaches out": (
        lambda f: (f / names.CHAT_TEMPLATE).write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        "cannot play a turn: SecurityError",
    ),
    "a run of another trainer": (
        lambda f: (f / names.WARM_STARTED).write_text('{"config": {"rollout": {"evil": 1}}}'),
        "is a checkpoint that this version cannot read",
    ),
}


@pytest.mark.parametrize("case", LOADS_BADLY)
def test_what_only_transformers_can_tell_is_refused_too(folder, case):
    spoil, expected = LOADS_BADLY[case]
    spoil(folder)
    with pytest.raises(Refused, match=re.escape(expected)):
        tried(folder)


def test_a_checkpoint_that_answers_garbage_is_taken_and_left_to_its_score(folder):
    """Finite weights whose products are not: the agent fails in play, and its episodes with it."""
    with_weights(lambda tensors: tensors[NORM].fill(np.finfo(np.float32).max))(folder)
    tried(folder)


def test_an_examination_loads_and_plays_in_its_own_process(folder, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@localhost")
    assert examine(folder, LIMITS) == check_folder(folder, LIMITS)


def test_a_refusal_comes_out_of_the_process(folder):
    pickled("pytorch_model.bin")(folder)
    with pytest.raises(Refused, match="pickled or other weights"):
        examine(folder, LIMITS)


def test_an_examination_takes_no_longer_than_it_may(folder):
    """Of processor time: loading torch alone takes longer."""
    with pytest.raises(Refused, match=r"could not be read and play one turn within 1 s"):
        examine(folder, LIMITS, seconds=1)


def test_an_examination_that_sleeps_is_ended_too(folder, monkeypatch):
    monkeypatch.setattr(examination, "_WAITED", 0.01)
    with pytest.raises(Refused, match=r"could not be read and play one turn within 10 s"):
        examine(folder, LIMITS, seconds=10)


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (-signal.SIGKILL, EndedUnexpectedly),
        (-signal.SIGTERM, CannotExamine),
        (-signal.SIGHUP, CannotExamine),
        (1, EndedUnexpectedly),
        (-signal.SIGABRT, Refused),
        (-signal.SIGSEGV, Refused),
    ],
)
def test_an_examination_that_somebody_killed_says_nothing_of_the_folder(status, raised):
    with pytest.raises(raised) as error:
        examination._judged(status, b"", "no words")
    assert error.type is raised  # One that ended unexpectedly counts against the submission, one that was stopped not.


def test_a_folder_that_is_gone_is_no_fault_of_the_sender(tmp_path):
    with pytest.raises(CannotExamine, match="cannot be read"):
        examine(tmp_path / "gone", LIMITS)
