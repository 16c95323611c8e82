"""What a model is served for: generation and embeddings, or one of them, or classes. --runner, --convert and --task."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError

# vLLM's older option → the two that have taken its place.
_TASKS = {
    "auto": ("auto", "auto"), "generate": ("generate", "auto"), "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"), "classify": ("pooling", "classify"), "score": ("pooling", "classify"),
    "reward": ("pooling", "reward"),
}  # fmt: skip


@dataclass(frozen=True)
class Purpose:
    runner: str = "auto"  # generate: text, and embeddings beside it; pooling: no text; auto: what the model can
    convert: str = "auto"  # what is made of its hidden states; auto and none: what the architecture says

    @property
    def classifies(self) -> bool:
        return self.convert in ("classify", "reward")


ANY = Purpose()


def read_purpose(task: str, runner: str, convert: str) -> Purpose:
    """What the options of these names say. Raises ConfigError where they contradict each other."""
    if task == "transcription":
        raise ConfigError("--task transcription: models here read text only, no audio: use another server for it")
    if task != "auto":
        if (runner, convert) != ("auto", "auto"):
            raise ConfigError(f"--task {task} is an older name of --runner and --convert: leave it out")
        runner, convert = _TASKS[task]
    if runner == "generate" and convert not in ("auto", "none"):
        raise ConfigError(f"--convert {convert} makes a model that generates no text: leave out --runner generate")
    if convert in ("embed", "classify", "reward"):
        runner = "pooling"
    return Purpose(runner, convert)
