"""All ranks hold one version of an adapter: whoever reads another, as its files were replaced meanwhile, is found."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vserve.engine.adapters.adapter import Adapter
from vserve.engine.adapters.book import AdapterBook
from vserve.engine.adapters.loading import AdapterLoading
from vserve.engine.link.messages import AdapterLoaded, LoadAdapter
from vserve.engine.ranks.adapters import OtherStores, RankStore
from vserve.engine.ranks.messages import AdapterRead, ForgetAdapters, ReadAdapter


class Store:
    """AdapterStore's face; its folder has `version` now."""

    def __init__(self, version: str) -> None:
        self.packed: dict[int, Any] = {}
        self.version = version

    def read(self, path: str, check: Any) -> Any:
        config: Any = SimpleNamespace(digest=self.version, stamp=(1,), base=None)
        files: Any = SimpleNamespace(digest="", stamp=(2,))
        adapter = Adapter(Path(path), config, files)
        check(adapter)
        return SimpleNamespace(has_head=False, rank=4), adapter


class Ranks:
    """Three of one engine; the others answer what their stores say, each on its own host."""

    def __init__(self) -> None:
        self.stores = [Store("old"), Store("old"), Store("old")]
        self.answers: list[AdapterLoaded] = []
        self.failed: list[int] = []
        self.book = AdapterBook(1, 1)
        self.others = OtherStores(self.tell, (1, 2))
        self.ranks: dict[int, RankStore] = {}
        for rank in (1, 2):
            channel: Any = SimpleNamespace(send=lambda message, rank=rank: self.hear(rank, message))
            store: Any = self.stores[rank]
            self.ranks[rank] = RankStore(store, channel, torch.device("cpu"))
        mine: Any = self.stores[0]
        self.loading = AdapterLoading(
            mine, self.book, self.answers.append, self.failed.append, lambda: None, self.others
        )
        self.loop = asyncio.get_running_loop()

    def tell(self, message: Any) -> None:
        for rank in self.ranks.values():
            if isinstance(message, ReadAdapter):
                rank.read(message)
            elif isinstance(message, ForgetAdapters):
                rank.forget(message)

    def hear(self, rank: int, message: AdapterRead) -> None:
        self.loop.call_soon_threadsafe(self.others.heard, rank, message)

    async def load(self, id: int, version: str = "") -> AdapterLoaded:
        self.loading.load(LoadAdapter(id, "/a", "sql", version))
        while not self.answers:
            await asyncio.sleep(0.001)
        return self.answers.pop()

    async def want(self, id: int) -> bool:
        """Somebody does; whether it has come."""
        self.book.wanted[id] = None
        self.failed.clear()
        while id in self.book.wanted:
            self.loading.fetch()
            await asyncio.sleep(0.001)
        return not self.failed

    @property
    def holding(self) -> list[list[int]]:
        return [list(store.packed) for store in self.stores]


def test_ranks_that_read_different_versions_are_told_apart() -> None:
    async def main() -> None:
        ranks = Ranks()
        assert (await ranks.load(1)).error is None and ranks.holding == [[1]] * 3
        ranks.stores[2].version = "new"
        error = (await ranks.load(2)).error
        assert error is not None and "rank 2 has read another version of /a than rank 0: give all hosts the" in error
        assert all(2 not in held for held in ranks.holding)
        ranks.loading.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_version_that_has_come_later_is_refused_by_whichever_rank_reads_it(
    changed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests end, the log says which folder; and when all have the old one again, it is served again."""

    async def main() -> None:
        ranks = Ranks()
        for id in (1, 2):  # which makes room
            assert (await ranks.load(id)).error is None
            await ranks.want(id)
            ranks.book.leave(id, 0)
        assert ranks.holding == [[2]] * 3
        ranks.stores[changed].version = "new"
        assert not await ranks.want(1) and ranks.failed == [1]
        who = f"rank {changed}: " if changed else ""
        assert f"adapter sql cannot be used: {who}/a has changed since it was loaded" in caplog.text
        assert all(1 not in held for held in ranks.holding)
        ranks.stores[changed].version = "old"
        assert await ranks.want(1) and ranks.holding == [[1]] * 3
        ranks.loading.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_an_engine_that_starts_again_takes_what_the_one_before_it_had() -> None:
    async def main() -> None:
        version = (await Ranks().load(1)).version
        ranks = Ranks()
        assert version and (await ranks.load(1, version)).error is None
        for store in ranks.stores:
            store.version = "new"
        error = (await ranks.load(2, version)).error
        assert error is not None and "/a has changed since it was loaded: load it again with load_inplace" in error
        assert not ranks.loading.knows(2) and (await ranks.load(3)).error is None

    asyncio.run(asyncio.wait_for(main(), 20))
