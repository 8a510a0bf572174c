"""One process of several: the command `trainer`, as `torchrun` starts it, or a function of the tests.

Processes meet through a file: what `torchrun` has them meet through listens on every interface of the machine. Of a
function the result is written for the test to read.
"""

import importlib
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from turngym_trainer.cli import main


def start(size, folder, *arguments):
    """Starts the command in so many processes; `folder` is theirs to meet in."""
    folder.mkdir(exist_ok=True)
    searched = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), *map(str, arguments)],
            env={
                **os.environ,
                "PYTHONPATH": searched,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def wait(processes):
    """Exit status, standard output and standard error of each."""
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        ended.append((process.returncode, out, err))
    return ended


def call(size, folder, name, argument):
    """What a function, `module:name`, returns in each of so many processes."""
    folder.mkdir(exist_ok=True)
    (folder / "argument").write_bytes(pickle.dumps(argument))
    for status, _, err in wait(start(size, folder, f"call={name}")):
        assert status == 0, err
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(size)]


if __name__ == "__main__":
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'met'}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )
    if arguments[0].startswith("call="):
        module, function = arguments[0].removeprefix("call=").split(":")
        result = getattr(importlib.import_module(module), function)(pickle.loads((folder / "argument").read_bytes()))
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
    else:
        sys.argv[1:] = arguments
        main()
