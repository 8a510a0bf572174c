"""Who may do what: tokens and roles, quotas, TLS and hosts, a board's sealed seeds."""
