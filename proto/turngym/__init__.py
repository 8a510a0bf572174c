"""turngym: text environments for LLM agents as a service. This package holds the contract, `turngym.v1`."""

from turngym.polling import poll_directly

__version__ = "0.1.0"

poll_directly()
