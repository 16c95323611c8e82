"""Bodies of the routes that load and unload adapters, as vLLM has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())


class LoadAdapterRequest(_Request):
    lora_name: str = Field(min_length=1, max_length=256, description="the name that requests give as their model")
    lora_path: str = Field(
        min_length=1, max_length=4096, description="its folder: below that of --lora-dir, or relative to it"
    )
    load_inplace: bool = Field(False, description="take the place of the adapter that has this name")
    base_model_name: str | None = Field(None, max_length=256, description="its parent in /v1/models")


class UnloadAdapterRequest(_Request):
    lora_name: str = Field(min_length=1, max_length=256, description="its name")
    lora_int_id: int | None = Field(None, description="looked at by nobody: the name says which")
