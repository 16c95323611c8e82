"""What rows and steps take of a machine's memory where the model runs on the CPU: counted, for nothing is profiled."""

from __future__ import annotations

from ...kernels.attention.history import ring_for
from ..cache.kv_layout import KVLayout, kv_layout
from ..cache.rows import NUM_COLUMNS
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..families.layer_spec import LayerSpec
from ..models.model import Model
from .host_memory import GIB, machine_bytes

FLOAT = 4  # bytes: what the CPU computes in
LOGIT_COPIES = 3  # of the sampler at its most expensive: the raw ones, a copy, what is sorted
ROW_BYTES = (NUM_COLUMNS + 1 + ring_for(0)) * 4 + 13  # of a row's parameters and counters, on both sides


def step_bytes(model: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Of the largest step, about: the widest block's activations, and logits with what the sampler makes of them."""
    token = 2 * model.hidden_size + max(_width(layer) for layer in set(model.layers))
    logits = LOGIT_COPIES * min(max_num_seqs, max_num_batched_tokens) * model.vocab_size
    return FLOAT * (max_num_batched_tokens * token + logits)


def _width(layer: LayerSpec) -> int:
    """Values of a token that its widest block has at once."""
    return max(layer.attention.width, layer.mlp.width)


def row_bytes(max_num_seqs: int, max_model_len: int, layout: KVLayout) -> int:
    """Of the tables that are as long as rows are many: blocks, the newest tokens, parameters."""
    return (max_num_seqs + 1) * (layout.row_bytes(max_model_len) + ROW_BYTES)


def check_rows(
    model: Model,
    weights: int,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    block_size: int,
) -> None:
    """Raises ConfigError where rows and steps alone are more than the machine has: before they are made."""
    layout = kv_layout(model, block_size, max_model_len)

    def needed(seqs: int) -> tuple[int, int]:
        tokens = seqs if max_num_batched_tokens == max_num_seqs else max_num_batched_tokens  # it may have followed
        return row_bytes(seqs, max_model_len, layout), step_bytes(model.config, tokens, seqs)

    total = machine_bytes()
    rows, step = needed(max_num_seqs)
    if weights + rows + step <= total:
        return
    fits, beyond = 0, max_num_seqs
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if weights + sum(needed(middle)) <= total * 9 // 10 else (fits, middle)
    remedy = f"set --max-num-seqs {fits} or less" if fits else "lower --max-num-batched-tokens"
    raise ConfigError(
        f"{max_num_seqs} running requests (--max-num-seqs) of {max_model_len} tokens (--max-model-len) in steps of "
        f"{max_num_batched_tokens} (--max-num-batched-tokens) do not fit: of {total / GIB:.2f} GiB, weights take "
        f"{weights / GIB:.2f}, rows {rows / GIB:.2f} and a step {step / GIB:.2f} GiB; {remedy}, or lower "
        "--max-model-len"
    )
