"""The RPCs of the contract: requests read, answered in batches, and written."""
