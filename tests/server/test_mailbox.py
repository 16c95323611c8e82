"""A slow reader finds everything, merged; a dead engine wakes every reader."""

import asyncio

import pytest

from vserve.engine.link.messages import RequestOutput
from vserve.engine.link.plan import TokenLogprobs
from vserve.server.client.mailbox import EngineDeadError, Mailbox, Mailboxes


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


def test_several_have_one_reader_who_finds_them_in_the_order_of_their_news():
    async def run():
        boxes = [Mailbox(id, 0.0) for id in range(4)]
        boxes[2].put(RequestOutput(2, [1]))  # before anybody looks
        news = Mailboxes(boxes)
        boxes[3].put(RequestOutput(3, [1]))
        boxes[0].put(RequestOutput(0, [1]))
        boxes[3].put(RequestOutput(3, [2], "stop"))  # merged: the reader has been told
        found = [await news.next() for _ in range(3)]
        assert found == [2, 3, 0]
        assert [boxes[index].take().token_ids for index in found] == [[1], [1, 2], [1]]
        assert boxes[3].finished and boxes[3].take() is None
        reader = asyncio.create_task(news.next())
        await asyncio.sleep(0)
        assert not reader.done()
        boxes[1].put(RequestOutput(1, [7]))
        boxes[1].fail("gone")
        assert await reader == await news.next() == 1
        assert boxes[1].take().token_ids == [7]  # what it said before it was gone still counts
        with pytest.raises(EngineDeadError, match="gone"):
            boxes[1].take()

    asyncio.run(run())
