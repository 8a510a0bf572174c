"""Makes the helpers beside the tests importable, and keeps gRPC's own lines out of what tests read."""

import os
import signal
import sys
from pathlib import Path

# Read by gRPC once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Tests run beside each other, each on one core; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is started in the background ignores it, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent))
