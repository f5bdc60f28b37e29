"""Waking readers on any loop: all of them, once per delivery, and never one that is not there."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import uvloop

from asyncllm.mailbox import Mailbox
from asyncllm.testing.engines import collect_garbage
from asyncllm.wakeups import Doors, LoopGoneError, Reply, Wakes

if TYPE_CHECKING:
    from collections.abc import Callable


def deliver(mailboxes: list[Mailbox[int]]) -> list[object]:
    wakes = Wakes()
    for number, mailbox in enumerate(mailboxes):
        mailbox.put(number, wakes)
    return [door for door, _ in wakes.flush()]


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_delivery_to_many_readers_of_a_loop_wakes_it_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = Doors()
    mailboxes: list[Mailbox[int]] = [Mailbox() for _ in range(50)]
    calls: list[object] = []

    async def main() -> list[int]:
        readers = [asyncio.ensure_future(mailbox.get(doors)) for mailbox in mailboxes]
        await asyncio.sleep(0)
        door = doors.current()
        schedule = type(door).__dict__["_drain"]

        def drain(self: object) -> None:
            calls.append(self)
            schedule(self)

        monkeypatch.setattr(type(door), "_drain", drain)
        thread = threading.Thread(target=deliver, args=(mailboxes,))
        thread.start()
        got = await asyncio.gather(*readers)
        thread.join()
        return list(got)

    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        assert runner.run(main()) == list(range(50))
    assert len(calls) == 1


def test_readers_on_trio_are_woken() -> None:
    doors = Doors()
    mailboxes: list[Mailbox[int]] = [Mailbox() for _ in range(5)]
    got: list[int] = []

    async def read(mailbox: Mailbox[int]) -> None:
        got.append(await mailbox.get(doors))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for mailbox in mailboxes:
                nursery.start_soon(read, mailbox)
            await trio.testing.wait_all_tasks_blocked()
            await trio.to_thread.run_sync(deliver, mailboxes)

    trio.run(main)
    assert sorted(got) == list(range(5))


def test_a_closed_loop_is_reported_and_the_other_readers_are_woken() -> None:
    doors = Doors()
    gone: Mailbox[int] = Mailbox()
    alive: Mailbox[int] = Mailbox()
    loop = asyncio.new_event_loop()
    task = loop.create_task(gone.get(doors))
    loop.run_until_complete(asyncio.sleep(0))
    gone_door = gone.reader_door

    async def main() -> int:
        reader = asyncio.ensure_future(alive.get(doors))
        await asyncio.sleep(0)
        loop.close()
        assert deliver([gone, alive]) == [gone_door]
        return await reader

    assert asyncio.run(main()) == 1
    del task


def test_a_loop_that_closes_with_an_unrun_wake_up_is_reported_by_the_next_one() -> None:
    doors = Doors()
    mailbox: Mailbox[int] = Mailbox()
    loop = asyncio.new_event_loop()
    task = loop.create_task(mailbox.get(doors))
    loop.run_until_complete(asyncio.sleep(0))
    door = mailbox.reader_door
    assert door is not None
    assert deliver([mailbox]) == []
    loop.close()  # before the wake-up ran
    with pytest.raises(LoopGoneError):
        door.wake()
    del task


def test_the_doors_keep_no_loop_alive() -> None:
    doors = Doors()

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        doors.current()
        return weakref.ref(asyncio.get_running_loop())

    reference = asyncio.run(main())
    collect_garbage()
    assert reference() is None


def test_a_reply_reaches_those_who_wait_and_those_who_come_later_on_every_kind_of_loop() -> None:
    doors = Doors()
    reply: Reply[int] = Reply()
    got: list[int] = []

    async def get() -> None:
        got.append(await reply.get(doors))

    def in_a_thread() -> None:
        got.append(reply.get_blocking())

    threads = [
        threading.Thread(target=asyncio.run, args=(get(),)),
        threading.Thread(target=trio.run, args=(get,)),
        threading.Thread(target=in_a_thread),
    ]
    for thread in threads:
        thread.start()
    while len(reply._waiters) < 3:
        pass
    reply.set(7)
    reply.set(8)  # the first answer stands
    for thread in threads:
        thread.join()
    asyncio.run(get())
    assert got == [7, 7, 7, 7]
