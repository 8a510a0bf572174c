"""Makes the helpers beside the tests importable, and keeps gRPC's own lines out of what tests read."""

import os
import sys
from pathlib import Path

# Read by gRPC once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
sys.path.insert(0, str(Path(__file__).parent))
