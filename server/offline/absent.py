"""What vLLM's classes for programs have and these have not, each with what to do instead."""

from __future__ import annotations

_OTHER_PROCESS = "the engine is a process of its own, and runs no functions of others"
_PROFILE = "profile from outside, as with `nsys profile python …` or py-spy"
_ASLEEP = "close() frees the memory, and another LLM loads the model again"

ABSENT = {
    "collective_rpc": f"{_OTHER_PROCESS}: leave it out",
    "apply_model": f"{_OTHER_PROCESS}: load the model with transformers to look at it",
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "sleep": _ASLEEP,
    "wake_up": _ASLEEP,
    "set_tokenizer": "name it at the start: LLM(model, tokenizer=…)",
    "beam_search": "beams are not built: SamplingParams(n=…, temperature=…) gives several answers",
    "llm_engine": "`info` has the settings in effect, get_metrics() the counters; LLMEngine goes step by step",
    "model_config": "`info` has the settings in effect",
    "init_weight_transfer_engine": f"{_OTHER_PROCESS}: save the weights, and start another LLM",
    "update_weights": f"{_OTHER_PROCESS}: save the weights, and start another LLM",
}


def absent(kind: str, name: str) -> AttributeError:
    """What a class raises for an attribute that it lacks."""
    why = f": {ABSENT[name]}" if name in ABSENT else ""
    return AttributeError(f"{kind} has no {name}{why}")
