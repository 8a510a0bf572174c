"""gym-sokoban's generator, for `level_generation.py`, which runs this in a virtual environment that has gym-sokoban.

Each line read asks for levels, `{"side": 8, "boxes": 2, "seconds": 1.0}`; the line written in answer has the CPU
seconds that they took, how many rooms were thrown away because they gave no level, and the levels as rows of `#`, ` `,
`.`, `$`, `*`, `@`, as many as were made within the seconds and at least one.
"""

import json
import sys
import time

from gym_sokoban.envs import room_utils

SYMBOLS = "# .*$@"
"""By room_utils.TYPE_LOOKUP: wall, floor, target, box on target, box, player. It never starts on a target."""


def level(side, boxes):
    """One level, and the number of rooms thrown away before it; as `SokobanEnv.reset` makes it, but not rendered."""
    thrown = 0
    while True:
        try:
            _, state, _ = room_utils.generate_room(
                dim=(side, side), num_steps=int(1.7 * (side + side)), num_boxes=boxes
            )
        except (RuntimeError, RuntimeWarning):
            thrown += 1
        else:
            return "\n".join("".join(SYMBOLS[int(cell)] for cell in row) for row in state), thrown


for line in sys.stdin:
    asked = json.loads(line)
    levels = []
    thrown = 0
    began = time.process_time()
    while not levels or time.process_time() - began < asked["seconds"]:
        made, failed = level(asked["side"], asked["boxes"])
        levels.append(made)
        thrown += failed
    print(json.dumps({"cpu_seconds": time.process_time() - began, "thrown": thrown, "levels": levels}), flush=True)
