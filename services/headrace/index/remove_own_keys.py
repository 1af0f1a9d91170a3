"""Empties the index for good: removes from Redis what Headrace keeps there, and nothing of anybody else's.

For the end of a deployment; the chart runs it after `helm uninstall`. Nodes that still run announce themselves and
register what they hold again, as after any loss of Redis. It must not hold anything up: it ends by its deadline,
whatever Redis does, and says what is left.

    HEADRACE_REDIS_URL=redis://... python -m headrace.index.remove_own_keys --deadline-s 30
"""

import argparse
import asyncio
import os
import sys

from redis.exceptions import ResponseError

from headrace.config import load_config
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import ConfigInvalid, IndexUnavailable
from headrace.core.index_limits import INDEX_PAUSE_MS, SWEEP_PAGE_KEYS
from headrace.index.redis_connections import RedisConnections
from headrace.index.redis_keys import ALL_KEYS_PATTERN


async def remove_own_keys(redis_url: str, *, deadline_s: float, clock: Clock | None = None) -> int:
    """Remove all keys of this layout's prefix from the database that the URL names; how many there were.

    A page at a time, and asked again after INDEX_PAUSE_MS where Redis does not answer. Raises IndexUnavailable when the
    deadline comes first or Redis refuses, ConfigInvalid for a URL that cannot be read.
    """
    redis = RedisConnections(redis_url, connections_max=1, clock=clock or SystemClock())
    why = "no answer"
    cursor, removed, more = 0, 0, True
    try:
        async with asyncio.timeout(deadline_s):
            while more:
                try:
                    cursor, keys = await _remove_page(redis, cursor)
                except IndexUnavailable as failed:
                    if isinstance(failed.__cause__, ResponseError):
                        raise
                    why = failed.why
                    await asyncio.sleep(INDEX_PAUSE_MS / 1000)
                else:
                    removed, more = removed + keys, cursor != 0
    except TimeoutError:
        raise IndexUnavailable(f"given up after {deadline_s:g} s: {why}") from None
    finally:
        await redis.close()
    return removed


async def _remove_page(redis: RedisConnections, cursor: int) -> tuple[int, int]:
    """The next cursor (0: there is no next page), and the keys of this page that were removed."""
    async with redis.call() as call:
        following, keys = await call.scan(cursor, pattern=ALL_KEYS_PATTERN, count=SWEEP_PAGE_KEYS)
        removed = await call.round_trip(*(("DEL", key) for key in keys))
        refused = next((reply for reply in removed if isinstance(reply, ResponseError)), None)
        if refused is not None:
            raise refused
    return following, sum(removed)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0 when the keys are gone, 1 when they are not, 2 for a URL that is none."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.index.remove_own_keys", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--deadline-s", type=float, default=30.0, help="End by then, whatever Redis does.")
    parsed = parser.parse_args(arguments)
    try:
        redis_url = load_config({}, environ=os.environ).index.redis_url
        if not redis_url:
            raise ConfigInvalid("redis_url", "names the Redis to empty; set HEADRACE_REDIS_URL")
        removed = asyncio.run(remove_own_keys(redis_url, deadline_s=parsed.deadline_s))
    except ConfigInvalid as error:
        print(error, file=sys.stderr)
        return 2
    except IndexUnavailable as error:
        print(f"Headrace's keys stay in Redis: {error.why}", file=sys.stderr)
        return 1
    print(f"removed {removed} keys")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
