"""A torchvision that was built for another torch is kept from transformers."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec

logger = logging.getLogger(__name__)
_NAME = "torchvision"


def hide_broken_torchvision() -> None:
    """transformers' models import torchvision wherever it is installed, also those of text, and fail with it. Before
    they are imported."""
    if _NAME in sys.modules or find_spec(_NAME) is None:
        return
    try:
        import_module(_NAME)
    except Exception as error:  # torch refuses its operators with a RuntimeError
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
        sys.modules[_NAME] = None  # type: ignore[assignment]  # which find_spec takes for not installed
        logger.warning(
            "torchvision cannot be imported (%s: %s): transformers' code does without; install the one that fits torch",
            type(error).__name__, error,
        )  # fmt: skip
