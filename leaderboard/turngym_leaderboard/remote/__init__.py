"""Agents that are programs of their owners, wherever they run: they play through the board's service, a proxy that
alone holds seeds, history and replay.

What such an agent is told is what every agent of the board reads: instructions and observations. Its episodes come in
an order of the board's, under random names; each instance is dealt once, however many attempts others have, and each of
its turns is answered once. An answer that does not come in time ends its episode as a failure, and so does an agent
that asks for nothing any more, so that leaving a losing episode gains nothing. What servers fail in is played again
from the answers that are kept.

`seats` says which episodes there are, `proxy` what follows from what is asked, `sessions` plays turns on the servers,
`keeper` looks after what nobody asks for. `turngym_leaderboard.store.remote` keeps it all. Knows nothing of HTTP.
"""
