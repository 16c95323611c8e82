"""A second model beside the first, for vectors, scores and classes: an engine of its own, behind the same address."""

from __future__ import annotations

import logging
import os

from ...engine.describe.reading import check_described
from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig
from ..client.engine_client import EngineClient
from ..client.mailbox import EngineDeadError
from ..options.beside import embedding_engine, of_second
from ..options.config import ServerConfig
from .model import TextModel, load_text_model

logger = logging.getLogger(__name__)


def on_gpu(config: EngineConfig) -> bool:
    """Whether its engine will have a card, as far as it can be told without torch."""
    return config.device != "cpu" and os.path.exists("/dev/nvidiactl")


class Beside:
    model: TextModel  # once it is loaded

    def __init__(self, config: ServerConfig, engine: EngineConfig) -> None:
        self.config = of_second(config)
        self.client = EngineClient(engine, restarts=config.engine_restarts, name="embedding engine")

    @classmethod
    def of(cls, config: ServerConfig, first: EngineConfig) -> Beside | None:
        """None where no second model is asked for."""
        engine = embedding_engine(config, first)
        return None if engine is None else cls(config, engine)

    async def start(self) -> None:
        """Returns when it can serve. On a card it starts before the first model's engine, which plans with what
        is left.

        Raises EngineDeadError.
        """
        try:
            await self.client.start()
        except EngineDeadError as error:
            raise EngineDeadError(f"--embedding-model: {error}") from None
        info, (name, *_) = self.client.info, self.config.served_model_name
        logger.info("beside it %s: %s, texts of up to %d tokens", name, ", ".join(info.tasks), info.max_model_len)

    def load(self) -> None:
        """Its tokenizer, on a thread. Raises ConfigError."""
        engine = self.client.config
        try:
            self.model = load_text_model(
                engine.model, self.config, engine, lambda folder: check_described(folder, engine)
            )
        except ConfigError as error:
            raise type(error)(f"--embedding-model: {error}") from None
