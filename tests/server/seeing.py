"""A model that sees pictures, small enough for a scripted engine: a tokenizer with the tokens around a picture, and a
template that shows pictures of users."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from tokenizers import AddedToken

from vserve.engine.link.media import MediaItem
from vserve.server.app import create_app
from vserve.server.media.decode import item_of, unpacked
from vserve.server.media.processes import DecoderError
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel

from .conftest import Client, ScriptedEngine, byte_level_tokenizer, save_tokenizer, script_of

BEGIN, PAD, END = 311, 312, 313
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' and m.role == 'user' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": PAD,
    "video_token_id": 0,
    "text_config": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
        "intermediate_size": 16, "vocab_size": 324, "rope_parameters": {"mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 16,
        "spatial_merge_size": 2, "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip


def seeing_folder(folder: Path) -> Path:
    core = byte_level_tokenizer()
    core.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")]
    )
    assert core.token_to_id("<|image_pad|>") == PAD
    save_tokenizer(folder, core, TEMPLATE, eos_token="<|im_end|>")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 1024, "longest_edge": 65536}})
    )
    return folder


def file_of(width: int = 64, height: int = 32, colour: str = "red", form: str = "PNG", **options: Any) -> bytes:
    """A picture, of two tokens."""
    found = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(found, form, **options)
    return found.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def part(file: bytes | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file_of() if file is None else file)}, **more}


def user(*parts: Any) -> dict[str, Any]:
    """A message of texts and pictures."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts],
    }


class InProcess:
    """Stands for the decoding processes, of which each costs the seconds that torch takes to load."""

    num_restarts = 0

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.num_decoded = 0
        self.dies = False

    def start(self) -> None: ...

    def decode(self, data: bytes, *, is_base64: bool, detail: str) -> MediaItem:
        self.num_decoded += 1
        if self.dies:
            raise DecoderError("ended its process")
        return item_of(unpacked(data) if is_base64 else data, self.processor, detail)

    def close(self) -> None: ...


class Seeing:
    """A server of such a model, what its engine is asked, and the stand-in for its decoding processes."""

    def __init__(self, model: TextModel, in_process: bool = True, length: int = 128, **options: Any) -> None:
        self.model = model
        self.engine = ScriptedEngine(script_of(model, "Hello world!"))
        self.engine.info = msgspec.structs.replace(self.engine.info, vocab_size=324, max_model_len=length)
        self.app = create_app(self.engine, ServerConfig(**options), model)  # type: ignore[arg-type]
        self.state = self.app.state.server
        self.processes: Any = InProcess(model.processor)
        if in_process:
            self.state.pictures.processes = self.processes
        self.client = Client(self.app)

    def ask(self, *messages: dict[str, Any], **body: Any) -> Any:
        return self.client.post("/v1/chat/completions", {"messages": list(messages), **body})

    @property
    def asked(self) -> Any:
        """What the engine was asked last."""
        return self.engine.submitted[-1]

    @property
    def prompt(self) -> str:
        return self.model.tokenizer.core.decode(self.asked.token_ids, skip_special_tokens=False)

    @property
    def colours(self) -> list[tuple[int, ...]]:
        """Of the first pixel of each picture."""
        found = []
        for item in self.asked.media:
            pixels = np.frombuffer(item.pixels, np.uint8).reshape(*item.size, 3)
            found.append(tuple(int(value) for value in pixels[0, 0, 0]))
        return found

    def close(self) -> None:
        self.client.close()
        self.state.pictures.close()
