"""Options that callers ask for, checked in threads: they run an environment's own code, which may take long or hang.

Knows nothing of what is done with them.
"""

import asyncio
import logging
from collections import OrderedDict, defaultdict
from typing import Final

from turngym_server.errors import ENVIRONMENT_ERRORS, ItemError, Reason, exception_text
from turngym_server.host import EnvironmentHost, ResolvedOptions
from turngym_server.sessions.session import Runtime
from turngym_server.sessions.threads import Overrun
from turngym_server.watching.logs import Event

log: Final = logging.getLogger(__name__)

CHECK_SECONDS: Final = 5.0
"""How long a check may take, where the environment's step deadline is no shorter."""
MAX_ENDLESS: Final = 2
"""Checks of one environment that ran past their deadline and go on; each takes time from all that the server does."""
MAX_KNOWN: Final = 512

_Key = tuple[str, str]
"""Environment id and options as they were sent."""


class OptionChecks:
    """Checks options, and keeps those that were found good, as most are asked for again. Belongs to one event loop.

    A check is the server's own once it is asked for, so that nobody who hangs up leaves more than a few behind.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: OrderedDict[_Key, ResolvedOptions] = OrderedDict()
        self._under_way: dict[_Key, asyncio.Task[ResolvedOptions | ItemError]] = {}
        self._endless: defaultdict[str, set[str]] = defaultdict(set)

    async def check(self, host: EnvironmentHost, options_json: str, account: str) -> ResolvedOptions:
        """Options from a client's JSON object.

        Args:
            account: for whom; callers are served in turn.

        Raises:
            ItemError: what `EnvironmentHost.resolve_options` says, or STEP_DEADLINE.
        """
        key = host.spec.id, options_json
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if (task := self._under_way.get(key)) is None:
            task = self._under_way[key] = self._runtime.spawn(self._check(host, options_json, account))
            task.add_done_callback(lambda _: self._under_way.pop(key))
        await asyncio.wait({task})
        checked = task.result()
        if isinstance(checked, ItemError):
            raise checked
        return checked

    async def _check(self, host: EnvironmentHost, options_json: str, account: str) -> ResolvedOptions | ItemError:
        spec = host.spec
        endless = self._endless[spec.id]
        deadline = min(CHECK_SECONDS, spec.step_deadline)

        def work() -> ResolvedOptions:
            if options_json in endless or len(endless) >= MAX_ENDLESS:
                which = "these options" if options_json in endless else f"{MAX_ENDLESS} other options"
                raise ItemError(
                    Reason.STEP_DEADLINE,
                    f"the check of {which} of {spec.id} ran past its deadline of {deadline:g} s and goes on: its "
                    "validators hang; ask for options that were taken before, or have the server started anew",
                )
            return host.resolve_options(options_json)

        try:
            resolved = await self._runtime.check_threads.run(
                work, deadline, late=lambda: endless.discard(options_json), account=account
            )
        except ItemError as error:
            return error
        except Overrun:
            endless.add(options_json)
            message = f"the check of options of {spec.id} ran past its deadline of {deadline:g} s"
            log.warning("%s: %.300s", message, options_json, extra=Event(environment=spec.id))
            return ItemError(Reason.STEP_DEADLINE, message)
        except ENVIRONMENT_ERRORS as error:  # A validator raised CancelledError, which no host expects.
            return ItemError(Reason.ENVIRONMENT_FAILED, f"{spec.id} failed in reading options: {exception_text(error)}")
        self._known[spec.id, options_json] = resolved
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return resolved
