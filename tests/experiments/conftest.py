"""Makes the scripts of experiments/ importable, as they are to each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
