"""Tiny random encoders with their tokenizers, written by transformers: the oracle of what reads texts both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

VOCAB_SIZE = 200
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = ["the quick brown fox jumps over the lazy dog", "what is the answer to this question", "there are seven of them"]
ROTATED = {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
# Keys of config.json beside those of all: what a family needs to be small, or would not show.
KINDS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 66, "pad_token_id": 1},
    "xlm-roberta": {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {"max_position_embeddings": 66, "pad_token_id": 1, "hidden_act": "gelu_new"},
    "electra": {"embedding_size": 64},
    "nomic_bert": {**ROTATED},
    "gte": {**ROTATED},
    "modernbert": {"num_hidden_layers": 4, "local_attention": 10, "cls_token_id": 2, "sep_token_id": 3,
        "hidden_activation": "gelu"},
    "eurobert": {"num_key_value_heads": 2, "mask_token_id": 4, **ROTATED},
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 10, "num_key_value_heads": 2,
        "head_dim": 16, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention",
        "sliding_attention"]},
}  # fmt: skip


def wordpiece() -> PreTrainedTokenizerFast:
    """BERT's way: [CLS] one [SEP] other [SEP], whose types are 0 and 1."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    ends = [(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def encoder_checkpoint(
    folder: Path, kind: str = "bert", auto: Any = AutoModel, seed: int = 0, std: float = 0.3, **overrides: Any
) -> Path:
    """`auto`: the class of transformers that says what is behind the layers; `overrides`: keys of config.json."""
    values = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": std, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None, **KINDS[kind], **overrides,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(AutoConfig.for_model(kind, **values))
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, 0.0, 0.5)
            elif "norm" in name.lower():
                torch.nn.init.normal_(weight, 1.0, 0.3)
    model.save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return Path(folder)


def as_sentence_transformer(folder: Path, pooling: str = "mean", *, normalize: bool = True, **settings: Any) -> Path:
    """Adds sentence-transformers' files. settings: of config_sentence_transformers.json, and max_seq_length."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    written = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    longest = settings.pop("max_seq_length", None)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    described = {f"pooling_mode_{mode}": kind == pooling for kind, mode in modes.items()}
    for path, content in (
        ("modules.json", written), ("1_Pooling/config.json", described | {"word_embedding_dimension": 64}),
        ("config_sentence_transformers.json", settings),
        ("sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False}),
    ):  # fmt: skip
        (folder / path).write_text(json.dumps(content))
    return folder
