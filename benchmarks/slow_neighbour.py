"""How much of their speed 63 quick episodes keep beside one that sleeps 300 ms in every step.

All 64 are of one environment, so their steps share requests. Measured in turns: quick ones alone, then beside the slow
one, and again; the ratio is taken within each turn. Goal: at least 0.8.
"""

from __future__ import annotations

import asyncio

import measure

from turngym_client import EpisodeRequest, aconnect

QUICK = 63
SLEEP = 0.3
SECONDS = 1.0
REPEATS = 20


async def run(address: str) -> dict[str, object]:
    async with aconnect(address) as client:
        quick = await client.reset_many([EpisodeRequest(environment_id="sleeper", level_seed=n) for n in range(QUICK)])
        slow = await client.reset("sleeper", options={"seconds": SLEEP})
        await measure.steps_per_second(quick, ["a"], 1.0)
        alone, beside, slow_steps, ratios = [], [], [], []
        for _ in range(REPEATS):
            alone.append(await measure.steps_per_second(quick, ["a"], SECONDS))
            together = await asyncio.gather(
                measure.steps_per_second(quick, ["a"], SECONDS), measure.steps_per_second([slow], ["a"], SECONDS)
            )
            beside.append(together[0])
            slow_steps.append(together[1])
            ratios.append(beside[-1] / alone[-1])
            print(f"alone {alone[-1]:8.0f} steps/s   beside {beside[-1]:8.0f}   ratio {ratios[-1]:.2f}")
    return {
        "quick_episodes": QUICK,
        "sleep_seconds": SLEEP,
        "repeats": REPEATS,
        "alone_steps_per_second": measure.summary(alone),
        "beside_steps_per_second": measure.summary(beside),
        "slow_steps_per_second": measure.summary(slow_steps),
        "ratio": measure.summary(ratios),
    }


def main() -> None:
    with measure.process("-m", "turngym_server.cli", "--env", "sleeper:Sleeper", "--port", "0") as server:
        results = asyncio.run(run(server.address))
    print(f"ratio {results['ratio']} (goal: at least 0.8)")
    measure.write("slow_neighbour", results)


if __name__ == "__main__":
    main()
