"""Serves text environments over gRPC."""
