"""Which drafts an engine makes, of those that --speculative-config asks for."""

from __future__ import annotations

from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..options.config import EngineConfig
from ..options.speculation import NO_DRAFTS, Speculation, read_speculation
from .state_slots import state_chunk


def choose_speculation(config: EngineConfig, model: ModelConfig, tokens: int, seqs: int) -> Speculation:
    speculation = read_speculation(config.speculative_config)
    if speculation is None:
        return NO_DRAFTS
    if not model.generates:
        raise ConfigError("--speculative-config: this model samples no tokens, there is nothing to draft; leave it out")
    if speculation.acceptance and config.load_format != "dummy":
        raise ConfigError(
            "--speculative-config: its rejection_sample_method 'synthetic' lets drafts hold that the model would not "
            "have sampled: that measures and answers nothing; add --load-format dummy (random weights), or leave it out"
        )
    if speculation.by_model:
        check_draftable(config, model, speculation)
    prompts = state_chunk(config) if model.has_state else 0  # beside everybody's drafts
    speculation = speculation.within(seqs, tokens - prompts, max(2, config.pipeline_parallel_size + 1))
    if any(drafts for _, drafts in speculation.depths):
        return speculation
    raise ConfigError(
        f"--speculative-config: a step of {tokens} tokens has no room for drafts"
        f"{f' beside {prompts} of a prompt' if prompts else ''}; raise --max-num-batched-tokens"
    )


def check_draftable(config: EngineConfig, model: ModelConfig, speculation: Speculation) -> None:
    """Raises ConfigError for what a model does not draft beside, so far."""
    instead = 'use {"method": "ngram"}, or leave it out'
    ranks, size = speculation.num_ranks, config.tensor_parallel_size
    if ranks not in (0, 1, size):
        may = f"{size}, as --tensor-parallel-size is, or 1, and every rank has all of what drafts" if size > 1 else "1"
        raise ConfigError(f"--speculative-config: its draft_tensor_parallel_size is {ranks}: it must be {may}")
    if config.pipeline_parallel_size > 1:
        why = f"--pipeline-parallel-size {config.pipeline_parallel_size}: a model drafts beside a whole one only so far"
        raise ConfigError(f"--speculative-config beside {why}; {instead}")
    if model.foreign is not None:
        why = f"{model.architecture} is computed by transformers' code, beside which no model drafts"
        raise ConfigError(f"--speculative-config: {why}; {instead}")
