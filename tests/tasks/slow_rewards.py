"""Rewards for tests, which do what the answer says; the module imports little, because each worker process imports it."""

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from urllib.error import HTTPError

running = []
tries = Counter()


async def act(what):
    """Do what the answer says, in the worker process."""
    kind, _, value = what.partition(" ")
    running.append(what)
    try:
        if kind == "sleep":
            await asyncio.sleep(float(value))
        if kind == "count":
            await asyncio.sleep(0.1)
            return len(running)
        if kind == "hang":
            await asyncio.sleep(600)
        if kind == "thread":
            await asyncio.to_thread(time.sleep, 600)
        if kind == "brief":
            await asyncio.to_thread(time.sleep, float(value))
        if kind == "block":
            await asyncio.sleep(0.1)
            time.sleep(600)
        if kind == "stubborn":
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(600)
        if kind == "loop":
            return id(asyncio.get_running_loop()) % 1000
        if kind == "crash":
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            raise SystemExit(0)
        if kind == "cancel":
            raise asyncio.CancelledError
        if kind == "text":
            return "much"
        if kind == "refused":
            raise PermissionError("no")
        if kind in ("busy", "down"):
            tries[what] += 1
            if tries[what] <= int(value):
                raise HTTPError("http://judge", 503, "busy", {}, None) if kind == "busy" else ConnectionResetError("down")
            return tries[what]
        return float(value)
    finally:
        running.remove(what)


def load():
    return act
