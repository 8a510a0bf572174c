"""StarPO-S training of LLM agents against remote environments."""
