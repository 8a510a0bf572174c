"""turngym: text environments for LLM agents as a service. This package holds the contract, `turngym.v1`."""

__version__ = "0.1.0"
