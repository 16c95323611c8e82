"""The requests that change the number of engines."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MOST_ENGINES = 64  # as --data-parallel-size allows


class ScaleRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    data_parallel_size: int = Field(ge=1, le=MOST_ENGINES, description="engines that are to serve")
    drain_timeout: float = Field(
        120.0, ge=0, le=86_400, description="seconds that requests get to finish on an engine that is removed"
    )


class ElasticRequest(BaseModel):
    """vLLM's name for it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    new_data_parallel_size: int = Field(ge=1, le=MOST_ENGINES, description="engines that are to serve")
    drain_timeout: float = Field(
        120.0, ge=0, le=86_400, description="seconds that requests get to finish on an engine that is removed"
    )
