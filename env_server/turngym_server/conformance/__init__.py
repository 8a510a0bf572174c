"""Does a server keep the contract? `python -m turngym_server.conformance HOST:PORT` asks one, in whatever language.

Every sentence of environment.proto that a client can check is a rule: a small function in the module of its subject,
whose docstring is what gets printed. Rules know a server by its replies alone; nothing here imports the server.
"""

from turngym_server.conformance.rule import Finding, Verdict
from turngym_server.conformance.suite import check

__all__ = ["Finding", "Verdict", "check"]
