"""A slow reader finds everything, merged; a dead engine wakes every reader."""

import asyncio

import pytest

from vserve.engine.messages import RequestOutput
from vserve.engine.plan import TokenLogprobs
from vserve.server.engine_client import EngineDeadError, Mailbox


def test_outputs_that_pile_up_are_merged():
    async def run():
        mailbox = Mailbox(7, 0.0)
        row = TokenLogprobs(-1.0, 1, [5], [-1.0])
        mailbox.put(RequestOutput(7, [1], logprobs=[row], num_cached_tokens=16, first_scheduled=2.0))
        mailbox.put(RequestOutput(7, [2], logprobs=[row]))
        mailbox.put(RequestOutput(7, [3], "stop", 3, logprobs=[row]))
        output = await mailbox.get()
        assert output == RequestOutput(7, [1, 2, 3], "stop", 3, [row] * 3, 16, 2.0)
        assert mailbox.finished

    asyncio.run(run())


def test_a_waiting_reader_is_woken_by_news_and_by_death():
    async def run():
        mailbox = Mailbox(1, 0.0)
        reader = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(RequestOutput(1, [4]))
        assert (await reader).token_ids == [4]
        reader = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.fail("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            await reader
        with pytest.raises(EngineDeadError, match="gone"):
            await mailbox.get()

    asyncio.run(run())
