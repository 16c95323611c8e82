# ruff: noqa: E501 (one folder a line)
"""Reading tokenizer.json alone: the ids and the text that transformers' AutoTokenizer gives, and no import of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from vserve.engine.errors import ConfigError
from vserve.server.options.config import ServerConfig
from vserve.server.text.files import read_tokenizer
from vserve.server.text.model import load_text_model

DEMO = Path(__file__).parents[2] / "configs" / "demo"
CORPUS = [
    "Hello world! How are you? the answer is 42, isn't it?",
    "user\nassistant  the the quick brown fox",
    "naïve café 你好",
]
TEXTS = [
    "", " ", "Hello world!", "  two  spaces ", "line\n\nbreak\r\n", "It's 12345 o'clock", "naïve cafe\u0301 你好 🤗 \x00",
    "<|im_start|>user\nHi<|im_end|>", "<s>a</s> <|endoftext|>", " <extra> x<extra>", "A .B , C ! n't 's", "\ttab ▁under",
]  # fmt: skip
LLAMA_SPECIAL = ["<unk>", "<s>", "</s>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(regex: bool = True, normalizer: Any = None) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=320, special_tokens=CHATML, initial_alphabet=alphabet, show_progress=False),
    )
    return core


def metaspace(legacy_form: bool) -> Tokenizer:
    """Llama 2's manner: byte fallback, and ▁ from a normalizer (as slow tokenizers were converted) or a pre-tokenizer."""
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokens = [*LLAMA_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False))
    state = json.loads(core.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in LLAMA_SPECIAL]
    core = Tokenizer.from_str(json.dumps(state))
    if legacy_form:
        core.pre_tokenizer = None
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def word_piece() -> Tokenizer:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    core.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    core.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return core


def added(core: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json's added_tokens_decoder."""
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {
        str(i): {flag: getattr(token, flag) for flag in flags} for i, token in core.get_added_tokens_decoder().items()
    }


def write(folder: Path, core: Tokenizer, model_type: str, name: str, **config: Any) -> Path:
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": name, "model_max_length": 4096, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def qwen(folder: Path, **config: Any) -> Path:
    core = byte_level(normalizer=normalizers.NFC())
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None}
    extra = ["<|im_start|>", "<|im_end|>"]
    return write(folder, core, "qwen3", "Qwen2Tokenizer", added_tokens_decoder=added(core), additional_special_tokens=extra,
                 **special | config)  # fmt: skip


def llama2(folder: Path, legacy_form: bool, **config: Any) -> Path:
    core = metaspace(legacy_form)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    return write(folder, core, "llama", "LlamaTokenizer", added_tokens_decoder=added(core), **special | config)


def llama3(folder: Path, name: str = "PreTrainedTokenizerFast", **config: Any) -> Path:
    core = byte_level()
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]),
        ]
    )
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return write(folder, core, "llama", name, **{"added_tokens_decoder": added(core)} | special | config)


def with_tokens(folder: Path, **flags: Any) -> Path:
    """Added tokens that are not special, and one that takes the space before it."""
    core = byte_level()
    core.add_tokens([AddedToken("<extra>", **flags), AddedToken("brown fox")])
    return write(
        folder, core, "llama", "PreTrainedTokenizerFast", added_tokens_decoder=added(core), eos_token="<|im_end|>"
    )


def special_map(folder: Path, **config: Any) -> Path:
    """As transformers wrote it before there was added_tokens_decoder."""
    write(folder, byte_level(), "mistral", "LlamaTokenizerFast", **config)
    tokens = {"eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False},
              "bos_token": "<|im_start|>"}  # fmt: skip
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    return folder


# name → (writes the folder, whether it is read without transformers)
FOLDERS: dict[str, tuple[Callable[[Path], Path], bool]] = {
    "demo": (lambda folder: DEMO, True),
    "qwen": (qwen, True),
    "qwen-as-llama-family": (lambda f: (qwen(f), (f / "config.json").write_text('{"model_type": "llama"}'))[0], True),
    "qwen2-with-another-class": (lambda f: (llama3(f), (f / "config.json").write_text('{"model_type": "qwen2"}'))[0], True),
    "qwen3-with-the-general-class": (lambda f: (llama3(f), (f / "config.json").write_text('{"model_type": "qwen3"}'))[0], True),
    "qwen-prefix-space": (lambda folder: qwen(folder, add_prefix_space=True), True),
    "qwen-defaults": (lambda folder: write(folder, byte_level(), "qwen2", "Qwen2Tokenizer"), True),
    "llama2": (lambda folder: llama2(folder, False), True),
    "llama2-legacy": (lambda folder: llama2(folder, True, legacy=True), True),
    "llama2-legacy-off": (lambda folder: llama2(folder, True, legacy=False), True),
    "llama2-no-prefix": (lambda folder: llama2(folder, False, add_prefix_space=False), True),
    "llama2-bos-eos": (lambda folder: llama2(folder, False, add_bos_token=False, add_eos_token=True), True),
    "llama2-clean-up": (lambda folder: llama2(folder, False, clean_up_tokenization_spaces=True), True),
    "llama3": (llama3, True),
    "llama3-named-llama": (lambda folder: llama3(folder, "LlamaTokenizerFast"), True),
    "llama3-bos-off": (lambda folder: llama3(folder, add_bos_token=False, add_eos_token=True), True),
    "added": (with_tokens, True),
    "added-lstrip": (lambda folder: with_tokens(folder, lstrip=True, rstrip=True, single_word=True), True),
    "special-map": (special_map, True),
    "mistral-metaspace": (lambda f: (llama2(f, True, legacy=True), (f / "config.json").write_text('{"model_type": "mistral"}'))[0], True),
    "eos-is-a-plain-token": (lambda folder: llama3(folder, eos_token="the"), True),
    # what changes tokens while loading, or is no class of ours, is left to transformers
    "pad-is-new": (lambda folder: llama3(folder, pad_token="<pad>"), False),
    "listed-and-not-there": (lambda f: llama3(f, added_tokens_decoder={"320": {"content": "<new>", "special": True}}), False),
    "split-special": (lambda folder: llama3(folder, split_special_tokens=True), False),
    "gpt2": (lambda folder: write(folder, byte_level(), "gpt2", "GPT2Tokenizer"), False),
    "bert": (lambda folder: write(folder, word_piece(), "bert", "BertTokenizer", unk_token="[UNK]"), False),
    "word-piece": (lambda f: write(f, word_piece(), "llama", "PreTrainedTokenizerFast", unk_token="[UNK]", cls_token="[CLS]"), True),
    "no-class": (lambda f: write(f, byte_level(), "llama", ""), False),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_same_as_auto_tokenizer(name: str, tmp_path: Path) -> None:
    write_folder, direct = FOLDERS[name]
    folder = write_folder(tmp_path)
    assert (read_tokenizer(folder) is not None) == direct
    tokenizer = load_text_model(str(folder), ServerConfig()).tokenizer
    oracle = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.special_tokens == oracle.special_tokens_map
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.core.get_vocab(True) == oracle.get_vocab()
    for text in TEXTS:
        for special in (True, False):
            ids = oracle.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, special) == ids, text
            for skip in (True, False):
                expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.core.decode(ids, skip_special_tokens=skip) == expected, text
    for token_id in range(tokenizer.core.get_vocab_size()):
        assert tokenizer.core.decode([token_id], False) == oracle.decode([token_id], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("form", ["text", "list", "file", "files"])
def test_templates(form: str, with_config: bool, tmp_path: Path) -> None:
    templates: Any = {
        "text": "{{ 1 }}",
        "list": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    }
    folder = llama3(tmp_path, chat_template=templates.get(form, "in the config" if with_config else None))
    if form.startswith("file"):
        (folder / "chat_template.jinja").write_text("from a file")
    if form == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer, oracle = (
        load_text_model(str(folder), ServerConfig()).tokenizer,
        AutoTokenizer.from_pretrained(str(folder)),
    )
    messages = [{"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in (None, [tool]):
        expected = oracle.apply_chat_template(messages, tokenize=False, tools=tools)
        assert tokenizer.render(messages, {"tools": tools}) == expected


def test_what_the_api_process_imports() -> None:
    """Each of these takes seconds. None is needed to answer HTTP."""
    code = f"""
import sys, time
from vserve.server.app import create_app
from vserve.server.cli import serve
from vserve.engine.options.config import ConfigError
from vserve.server.options.config import ServerConfig
from vserve.server.client.engine_client import EngineClient
from vserve.server.text.model import load_text_model
model = load_text_model({str(DEMO)!r}, ServerConfig())
model.tokenizer.render([{{"role": "user", "content": "Hi"}}], {{}})
print(sorted({{"torch", "transformers", "triton", "huggingface_hub", "xgrammar", "llguidance"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError) as caught:
        load_text_model(str(tmp_path), ServerConfig())
    assert f"there is no tokenizer.json in {tmp_path}: copy it there" in str(caught.value)
    assert str(caught.value).endswith("name another with --tokenizer")
