"""Other processes than the server's own: workers behind a front, and an environment instance a process."""
