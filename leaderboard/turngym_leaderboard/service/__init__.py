"""A board over HTTP: a JSON API for programs, pages for people, and the uploads of those who submit.

`messages` is what API and client say to each other, `api` the calls, `uploads` receives files, `access` knows who
calls, `rate_limits` and `bounds` say how much and how often, `problems` how a refusal reads, `app` puts all that
together and `serving` listens. Of agents the service plays only those that are programs of their owners (`remote_api`,
over `turngym_leaderboard.remote`), and imports neither torch nor transformers: workers play all others, and the two
meet in the database alone.
"""
