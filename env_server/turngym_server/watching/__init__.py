"""What a server says of itself while it runs: counts, Prometheus metrics, logs, traces, the live view."""
