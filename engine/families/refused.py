"""Architectures that nothing here can serve, by name: what each needs that is not there.

They are transformers' classes or known from the hub. A class without a family of its own is looked up here before
anything else is tried, without torch.
"""

from __future__ import annotations

from collections.abc import Iterable

_RECURRENT = (
    "its layers keep a recurrent state of a kind that there is no cache for, beside or in place of keys and values"
)
_OWN_ATTENTION = "its attention is computed in its own way, without the interface that a paged cache needs"
_ALIBI = "its attention adds a bias for distances (ALiBi), which the attention kernels do not have"
_SPARSE = "its attention chooses which keys it reads, which the attention kernels do not do"
_DIFFUSION = "it writes text by diffusion, not token after token"
_PARTS = "it needs inputs beside text, or several models at once"
_ENCODER = "it is an encoder of a kind that is not computed here"
_ENCODER_DECODER = "it has an encoder and a decoder, and only decoders are served"

# What a class's name begins with → why. Longer beginnings count before shorter ones.
_BEGINNINGS = {
    **dict.fromkeys(
        (
            "BailingHybrid", "BailingMoeV2_5", "CohereCompass", "FalconMamba", "Inkling", "Jamba", "KimiLinear",
            "Lfm2Vl", "Lfm3", "Mamba", "MiniMaxForCausalLM", "MiniMaxM1", "MiniMaxText01", "OlmoHybrid", "Phi4Flash",
            "Plamo2", "Qwen4Exp", "RWKV", "Rwkv", "RecurrentGemma", "Zamba", "Zaya", "xLSTM",
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(
        (
            "BigBird", "CodeGen", "CpmAnt", "GPTJ", "GPTNeoForCausalLM", "GPTNeoXJapanese", "OpenAIGPT", "Reformer",
            "TransfoXL", "XGLM", "XLMWithLMHead", "XLNet", "FalconForCausalLM",
        ),
        _OWN_ATTENTION,
    ),
    **dict.fromkeys(("Baichuan", "BaiChuan", "Bloom", "MPT", "Mpt"), _ALIBI),
    **dict.fromkeys(
        ("DeepseekV32", "DeepseekV4", "GlmMoeDsa", "MiniMaxM3", "MistralLarge4"), _SPARSE
    ),
    **dict.fromkeys(("Dream", "DiffusionGemma", "LLaDA"), _DIFFUSION),
    **dict.fromkeys(
        ("Blt", "Emu3", "Fuyu", "Gemma4Assistant", "Gemma4UnifiedAssistant", "Git", "GotOcr2", "Mllama", "Moshi",
         "Musicgen", "Phi4Multimodal", "TrOCR"),
        _PARTS,
    ),
    **dict.fromkeys(
        (
            "Albert", "Bert", "Camembert", "ConvBert", "Data2Vec", "Deberta", "DistilBert", "Electra", "Ernie",
            "Flaubert", "Funnel", "Longformer", "MPNet", "MegatronBert", "MobileBert", "ModernBert", "NomicBert",
            "Nystromformer", "RemBert", "RoCBert", "RoFormer", "Roberta", "SqueezeBert", "XLMRoberta", "Xmod",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            "BartFor", "BigBirdPegasus", "Blenderbot", "EncoderDecoder", "LED", "LongT5", "M2M100", "MBart", "MT5",
            "Marian", "Mvp", "PLBart", "Pegasus", "ProphetNet", "SwitchTransformers", "T5", "UMT5", "Whisper",
        ),
        _ENCODER_DECODER,
    ),
    # They begin or end like others, and are decoders.
    "Ernie4_5": "",
    **dict.fromkeys(  # of which the decoder is served
        ("Gemma3For", "Gemma4For", "Gemma4UnifiedFor", "Glm4v", "Glm46V", "InternVL", "KimiK25", "Kimi_K25",
         "Llama4For", "LlavaFor", "LlavaNext", "LlavaOnevision", "Mistral3For", "Qwen2VL", "Qwen2_5_VL",
         "Qwen3_5For", "Qwen3_5MoeFor", "Qwen3VL"),
        "",
    ),
    "ModernBertDecoder": "",
}  # fmt: skip
_ENDINGS = {
    "ForConditionalGeneration": _PARTS,
    "ForMaskedLM": _ENCODER,
    "ForQuestionAnswering": "it marks answers in a text, it generates none",
    "ForTokenClassification": "it labels tokens, it generates none",
}


def reason_of(architecture: str) -> str:
    """Why no model of this class can be served; "": nothing is known against it."""
    found = max((begin for begin in _BEGINNINGS if architecture.startswith(begin)), key=len, default=None)
    if found is not None:
        return _BEGINNINGS[found]
    return next((reason for end, reason in _ENDINGS.items() if architecture.endswith(end)), "")


def refusal(architectures: Iterable[str]) -> str | None:
    """The line that refuses a config.json with these architectures; None: none of them is known to be impossible."""
    for name in architectures:
        if reason := reason_of(str(name)):
            return f"architecture {name} is not served: {reason}; use another model"
    return None
