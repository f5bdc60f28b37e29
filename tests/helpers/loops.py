"""Running a test's coroutine on each event loop that callers use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["HANG_GUARD_SECONDS", "both_loops", "on_loop"]

HANG_GUARD_SECONDS: Final = 300.0

both_loops: Final = pytest.mark.parametrize("library", ["asyncio", "trio"])
"""Run the test on asyncio and on trio."""


def on_loop(library: str, main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on a new loop; fail it if it hangs."""

    async def guarded() -> None:
        with anyio.fail_after(HANG_GUARD_SECONDS):
            await main()

    anyio.run(guarded, backend=library)
