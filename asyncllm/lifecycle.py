"""An engine's life: opening, closing, dropping, the interpreter's exit, forks.

Runs on callers' threads, on any event loop or none; owns one opening at a time. Invariant: whoever leaves, in
whichever way, the engine thread is asked to stop, and it holds no reference to what owns this object, so that a
dropped engine is noticed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING, Final

import anyio

from asyncllm.engine_loop import EngineLoop
from asyncllm.errors import EngineError
from asyncllm.front_desk import FrontDesk, engine_closed
from asyncllm.inbox import Close, Inbox
from asyncllm.intake import Intake
from asyncllm.outputs import EngineState

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import Backend, OpenBackend
    from asyncllm.config import EngineConfig
    from asyncllm.wakeups import Doors

__all__ = ["Lifecycle", "Opening"]

_HANGS: Final = (
    "%s is closed, but its thread did not end within close_timeout_seconds=%g and is left to itself: "
    "its memory comes back when that ends, if ever. It stands at\n%s"
)

log = logging.getLogger("asyncllm")


class Opening:
    """One opening of an engine: its thread and the doors to it.

    Attributes:
        intake, model: set once the model is open.
    """

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.desk = FrontDesk(max_waiting=config.max_waiting_requests)
        self.inbox = Inbox()
        self.loop = EngineLoop(config, backend, self.desk, self.inbox)
        self.thread = threading.Thread(target=self.loop.run, name="asyncllm-engine", daemon=True)
        self.intake: Intake | None = None
        self.model: OpenBackend | None = None


class Lifecycle:
    """Opens and closes one engine, any number of times.

    Args:
        name: of the engine, for warnings.
        config: its settings.
        backend: what runs the model; None: torch.
        doors: the callers' loops.
    """

    def __init__(self, name: str, config: EngineConfig, backend: Backend | None, doors: Doors) -> None:
        self._name = name
        self._config = config
        self._backend = backend
        self._doors = doors
        self._lock = threading.Lock()  # of beginning and ending; never held while waiting
        self._opening: Opening | None = None
        self._resting_state = EngineState.NEW  # while there is no opening
        self._process_id = os.getpid()
        self._finalizer: weakref.finalize[..., Lifecycle] | None = None
        self._at_exit: Callable[[], None] | None = None

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        opening = self._opening
        return self._resting_state if opening is None else opening.desk.state

    @property
    def opening(self) -> Opening | None:
        """What is open, opening, closing or failed; None before the first start and after a close."""
        return self._opening

    def open_intake(self) -> tuple[Opening, Intake]:
        """Return what takes requests.

        Raises:
            EngineError: there is none: not open, failed, or this process is a fork of the engine's.
        """
        opening = self.serving()
        opening.desk.check_open()
        if opening.intake is None:
            raise engine_closed(EngineState.STARTING)
        return opening, opening.intake

    def serving(self) -> Opening:
        """Return what runs, be it that it only drains; raises as `open_intake`."""
        self.check_process()
        opening = self._opening
        if opening is None:
            raise engine_closed(self._resting_state)
        opening.desk.check_serving()
        return opening

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child's copy, whose thread stayed in the parent."""
        return os.getpid() != self._process_id

    def check_process(self) -> None:
        """Raise EngineError in a forked child."""
        if self.is_foreign:
            raise EngineError("this engine belongs to the parent process: open one here, after the fork")

    async def start(self) -> None:
        """Load the model and start the engine thread; a second call waits for the first.

        Raises:
            ModelLoadError, ConfigurationError: the model cannot be opened as asked.
            EngineClosedError: the engine was closed meanwhile.
        """
        self._doors.check_thread()
        opening, is_mine = self._begin()
        try:
            model = await opening.loop.opened.get(self._doors)
        except BaseException:
            if is_mine:  # cancelled, or failed: nothing may be left of it
                opening.inbox.post(Close())
                await self._wait_closed(opening)
            raise
        self._note_open(opening, model)

    def start_blocking(self) -> None:
        """Same as `start`, for code without an event loop: blocks this thread."""
        self._doors.check_thread()
        opening, is_mine = self._begin()
        try:
            model = opening.loop.opened.get_blocking()
        except BaseException:
            if is_mine:
                opening.inbox.post(Close())
                self._wait_closed_blocking(opening)
            raise
        self._note_open(opening, model)

    def _begin(self) -> tuple[Opening, bool]:
        self.check_process()
        with self._lock:
            opening = self._opening
            if opening is not None and opening.desk.state is not EngineState.CLOSED:
                if opening.desk.state is not EngineState.STARTING:
                    opening.desk.check_open()
                return opening, False
            opening = self._opening = Opening(self._config, self._backend or _torch_backend())
            self._forget_watchers()  # of an opening that closed itself
            self._finalizer = weakref.finalize(self, _close_dropped, opening, self._name, self._process_id)
            self._finalizer.atexit = False
            self._at_exit = functools.partial(
                _close_at_exit, weakref.ref(self), weakref.ref(opening.thread), self._config.close_timeout_seconds
            )
            atexit.register(self._at_exit)
            self._doors.engine_thread = opening.thread
            opening.thread.start()
            return opening, True

    def _note_open(self, opening: Opening, model: OpenBackend) -> None:
        with self._lock:
            if opening.model is None and opening.desk.state is EngineState.RUNNING:
                opening.intake = Intake(model, seed=self._config.seed)
                opening.model = model

    async def aclose(self) -> None:
        """End all streams, stop after the step in flight, give all memory back; see `Engine.aclose`."""
        opening = self._begin_close()
        if opening is not None and threading.current_thread() is not opening.thread:
            await self._wait_closed(opening)

    def close(self) -> None:
        """Same as `aclose`, from any thread, with or without a loop.

        On the engine thread itself (in a step listener) both only ask, since it cannot wait for itself.
        """
        opening = self._begin_close()
        if opening is not None and threading.current_thread() is not opening.thread:
            self._wait_closed_blocking(opening)

    def _begin_close(self) -> Opening | None:
        opening = self._opening
        if opening is not None and not self.is_foreign:
            opening.inbox.post(Close())
            return opening
        return None

    async def _wait_closed(self, opening: Opening) -> None:
        """Wait for the engine thread's end, for as long as `close_timeout_seconds`; not to be cancelled."""
        until = time.monotonic() + self._config.close_timeout_seconds
        cancelled: BaseException | None = None
        while not opening.loop.closed.done and (left := until - time.monotonic()) > 0.0:
            try:
                with anyio.move_on_after(left, shield=True):
                    await opening.loop.closed.get(self._doors)
            except anyio.get_cancelled_exc_class() as error:  # asyncio's own cancellation passes through a shield
                cancelled = error
        self._end_close(opening)
        if cancelled is not None:
            raise cancelled

    def _wait_closed_blocking(self, opening: Opening) -> None:
        with contextlib.suppress(TimeoutError):
            opening.loop.closed.get_blocking(self._config.close_timeout_seconds)
        self._end_close(opening)

    def _end_close(self, opening: Opening) -> None:
        """Drop what was opened, so that its memory can go. If its thread hangs, tell its callers in its place."""
        seconds = self._config.close_timeout_seconds
        with self._lock:
            hangs = not opening.loop.closed.done
            if hangs:
                opening.loop.give_up(seconds)
        if hangs:
            log.error(_HANGS, self._name, seconds, _stack(opening.thread))
        if not opening.loop.gave_up:
            opening.thread.join()  # it has nothing left to do but to end
        with self._lock:
            if self._opening is not opening:
                return
            self._opening = None
            self._resting_state = EngineState.CLOSED
            self._forget_watchers()

    def _forget_watchers(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)

    def close_at_exit(self) -> None:
        """Stop the engine thread before the interpreter goes: a daemon thread inside torch would abort it."""
        if self.is_foreign or self._opening is None or self.state is EngineState.CLOSED:
            return
        warnings.warn(f"{self._name} was open at exit; use `async with` or `with`", ResourceWarning, stacklevel=2)
        self.close()


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # documented by Python
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


def _torch_backend() -> Backend:
    """Imported at the first start: `import asyncllm` must not import torch."""
    from asyncllm.model.open import TorchBackend  # noqa: PLC0415  # see above

    return TorchBackend()


def _close_dropped(opening: Opening, name: str, process_id: int) -> None:
    """Finalizer of an engine that nobody closed."""
    if os.getpid() == process_id and not opening.loop.closed.done:
        opening.inbox.post(Close())
        warnings.warn(f"{name} was dropped without close(); use `async with` or `with`", ResourceWarning, stacklevel=2)


def _close_at_exit(
    reference: weakref.ref[Lifecycle], thread_reference: weakref.ref[threading.Thread], seconds: float
) -> None:
    lifecycle, thread = reference(), thread_reference()
    if lifecycle is not None:
        lifecycle.close_at_exit()
    elif thread is not None:  # the engine was dropped just now: its thread was asked to end, and may be inside torch
        thread.join(seconds)
