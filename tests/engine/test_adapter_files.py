"""Adapters' folders that are none, that change, or that would harm who reads them: refused in one line, in no time."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from vserve.engine.adapters import peft_files
from vserve.engine.adapters.adapter import WEIGHTS_FILE, Adapter
from vserve.engine.adapters.layout import AdapterStore, SlotLayout
from vserve.engine.adapters.peft_files import CONFIG_FILE, AdapterError
from vserve.engine.link.messages import LoadAdapter
from vserve.engine.link.plan import ADAPTER_UNUSABLE
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.client.engine_client import EngineClient

from .conftest import collect

PROMPT = [*range(20, 60)]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def base(tiny_model: Any) -> Path:
    folder: Path = tiny_model("llama")
    return folder


@pytest.fixture
def folder(base: Path, adapter_files: Any, tmp_path: Path) -> Path:
    made: Path = adapter_files.write_adapter(tmp_path / "adapter", base, ["q_proj", "up_proj"])
    return made


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        Adapter.open(folder)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600
    return said


def link_to(target: str) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return spoil


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def header(text: str) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(struct.pack("<Q", len(text)) + text.encode())


# Which file, what is done to it, and what is said of it.
SPOILT: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a pipe": (CONFIG_FILE, pipe, "is no file: pass a folder"),
    "a device without end": (CONFIG_FILE, link_to("/dev/zero"), "is no file: pass a folder"),
    "a folder": (CONFIG_FILE, lambda f: (f.unlink(), f.mkdir()), "is no file: pass a folder"),
    "links in a circle": (CONFIG_FILE, link_to(CONFIG_FILE), "cannot read"),
    "too large": (CONFIG_FILE, lambda f: f.write_bytes(b" " * 2000), "has more than 0 MB"),
    "too deep": (CONFIG_FILE, lambda f: f.write_text("[" * 10**5), "maximum recursion depth exceeded"),
    "too many digits": (CONFIG_FILE, lambda f: f.write_text('{"r": ' + "9" * 900 * 5 + "}"), "cannot read"),
    "weights in a pipe": (WEIGHTS_FILE, pipe, "has no adapter_model.safetensors"),
    "weights without end": (WEIGHTS_FILE, link_to("/dev/zero"), "has no adapter_model.safetensors"),
    "a header too deep": (WEIGHTS_FILE, header("[" * 10**5), "has a corrupt header (RecursionError"),
    "a header too long": (WEIGHTS_FILE, lambda f: f.write_bytes(struct.pack("<Q", 1 << 40)), "bad header"),
    "a header that takes long": (WEIGHTS_FILE, header(" " * (17 << 20)), "has a header of 17825792 bytes, and at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.timeout(60)
def test_what_is_no_file_of_an_adapter(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, spoil, words = SPOILT[name]
    if name == "too large":
        monkeypatch.setattr(peft_files, "LARGEST", 1999)
    spoil(folder / file)
    assert words in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none(value: float, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors[FIRST][3, 1] = 3e38  # and another makes the sum infinite: that is no reason
    tensors[FIRST][4, 1] = 3e38
    save_file(tensors, folder / WEIGHTS_FILE)
    assert Adapter.open(folder).read(FIRST)[3, 1] == 3e38
    tensors[FIRST][2, 1] = value
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=f"NaN or infinite values in {FIRST}"):
        Adapter.open(folder).read(FIRST)


def test_numbers_that_are_many_are_looked_at_where_they_lie(folder: Path) -> None:
    """Without a copy in float32; their sum may be too large for their own type."""
    tensors = {name: tensor.half() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    tensors[FIRST][:, 2] = 6e4
    save_file(tensors, folder / WEIGHTS_FILE)
    adapter = Adapter.open(folder)
    assert torch.equal(adapter.read(FIRST), tensors[FIRST])
    other = FIRST.replace("lora_B", "lora_A")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        shape = list(adapter.read(other).shape)
    done = {event.name for event in profile.events() if event.input_shapes[:1] == [shape]}
    assert "aten::sum" in done and not done & {"aten::copy_", "aten::isfinite"}
    tensors[other][3, 1] = float("nan")
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=f"NaN or infinite values in {other}"):
        Adapter.open(folder).read(other)


def test_who_reads_takes_short_turns(folder: Path) -> None:
    """Steps need the interpreter's lock meanwhile; also where the reading fails."""
    turns = [sys.getswitchinterval()]

    def check(adapter: Adapter) -> None:
        turns.append(sys.getswitchinterval())
        raise AdapterError("planted")

    nothing: Any = None
    with pytest.raises(AdapterError, match="planted"):
        AdapterStore(nothing, torch.float32, pin=False).read(str(folder), check)
    assert turns[1] < turns[0] / 5 and sys.getswitchinterval() == turns[0]


def test_a_name_without_end_is_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors[FIRST.replace("layers", "l" * 1000)] = tensors.pop(FIRST)
    save_file(tensors, folder / WEIGHTS_FILE)
    assert "has a tensor whose name has 1056 characters, 'base_model.model.model.llll" in refusal(folder)
    assert "and at most 1000 are read" in refusal(folder)


def test_a_version_is_the_same_on_any_host(base: Path, folder: Path, adapter_files: Any, tmp_path: Path) -> None:
    """Copies are of one version, whenever they were made; another training is of another, all sizes being equal."""
    first = Adapter.open(folder)
    copy = Adapter.open(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile))
    newer = Adapter.open(adapter_files.write_adapter(tmp_path / "newer", base, ["q_proj", "up_proj"], seed=1))
    assert copy.version == first.version and copy.stamp != first.stamp
    assert newer.files.headers.keys() == first.files.headers.keys() and newer.version != first.version
    assert Adapter.open(change(tmp_path / "copy", lora_alpha=9)).version != first.version


def test_a_file_that_is_cut_short_kills_nobody(folder: Path) -> None:
    """A mapped page behind the end of its file would end this process."""
    adapter = Adapter.open(folder)
    held = {name: adapter.read(name) for name in adapter.files.headers}
    os.truncate(folder / WEIGHTS_FILE, 100)
    assert all(tensor.isfinite().all() for tensor in held.values())
    with pytest.raises(AdapterError, match="has changed while it was read: load it again when it is whole"):
        adapter.read(FIRST)


def test_all_tensors_are_of_one_version(base: Path, folder: Path, adapter_files: Any, tmp_path: Path) -> None:
    other = adapter_files.write_adapter(tmp_path / "other", base, ["q_proj", "up_proj"], seed=1)
    adapter = Adapter.open(folder)
    first = adapter.read(FIRST)
    os.replace(other / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match="has changed while it was read"):
        adapter.read(FIRST)
    assert not torch.equal(Adapter.open(folder).read(FIRST), first)


def test_a_folder_that_has_changed_is_another_adapter(
    base: Path, folder: Path, adapter_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It had to leave the host's memory. Read again it would be mixed with what is cached of its prompts: who asks for
    it is told, until it is loaded again. Also of an engine that starts again, which gets the version with the path."""
    packed: list[Path] = []
    pack = SlotLayout.pack

    def count(layout: SlotLayout, adapter: Adapter, *rest: Any) -> Any:
        packed.append(adapter.folder)
        return pack(layout, adapter, *rest)

    monkeypatch.setattr(SlotLayout, "pack", count)
    rest = [adapter_files.write_adapter(tmp_path / name, base, ["v_proj"], seed=9) for name in "ab"]
    newer = adapter_files.write_adapter(tmp_path / "newer", base, ["q_proj", "up_proj"], seed=1)
    old, new = (adapter_files.greedy(adapter_files.merged(base, path), PROMPT, 4) for path in (folder, newer))
    assert old != new

    async def main() -> None:
        client = EngineClient(EngineConfig(
            str(base), device="cpu", engine_in_process=True, cpu_threads=1, enable_lora=True, max_model_len=96,
            max_num_seqs=4, block_size=4, max_loras=1, max_cpu_loras=1,
        ))  # fmt: skip
        await client.start()

        async def ask(adapter: int) -> Any:
            sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, adapter=adapter)
            return await collect(client, PROMPT, sampling)

        try:
            assert (await client.load_adapter(LoadAdapter(1, str(folder)))).error is None
            assert (await ask(1)).tokens == old
            for id, path in enumerate(rest, 2):
                assert (await client.load_adapter(LoadAdapter(id, str(path)))).error is None
                assert (await ask(id)).error is None
            os.replace(newer / WEIGHTS_FILE, folder / WEIGHTS_FILE)
            packed.clear()
            for _ in range(2):
                assert (await ask(1)).error == ADAPTER_UNUSABLE
            known = client.adapters[1]
            again = (await client.load_adapter(msgspec.structs.replace(known, id=5))).error
            assert again is not None and again in caplog.text
            assert f"{folder} has changed since it was loaded: load it again with load_inplace" in again
            assert not packed, "its headers tell"
            assert (await client.load_adapter(LoadAdapter(4, str(folder)))).error is None
            assert (await ask(4)).tokens == new
            shutil.rmtree(folder)
            assert (await ask(2)).error is None
        finally:
            await client.close()

    asyncio.run(main())


ENDLESS = r"(\w+\w*\w*\.?)+!"  # also of a name of 26 characters, and of a fast machine


def change(folder: Path, **keys: Any) -> Path:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize("field", ["rank_pattern", "target_modules"])
def test_an_expression_that_never_ends_holds_up_nobody(field: str, folder: Path) -> None:
    """It backtracks for years. Other threads go on meanwhile: who holds the interpreter uses this process's time."""
    change(folder, **{field: {ENDLESS: 4} if field.endswith("pattern") else ENDLESS})
    products = [f"model.layers.{n}.self_attn.{name}_proj.{'x' * 40}" for n in range(2) for name in "qkvo"]
    said: list[str] = []
    longest = 0.0

    def read() -> None:
        try:
            Adapter.open(folder).check_complete(products, products)
        except AdapterError as error:
            said.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        started = time.process_time()
        time.sleep(0.005)
        longest = max(longest, time.process_time() - started)
    assert len(said) == 1 and "which takes more than 1 s to match: write a simpler one" in said[0]
    assert field in said[0] and longest < 5.0


def test_an_expression_that_cannot_be_matched_is_said(folder: Path) -> None:
    """Alone it is fine, at the end of a name it is none."""
    assert "alpha_pattern has '(?i)Q_PROJ' which cannot be matched (re.error" in refusal(
        change(folder, alpha_pattern={"(?i)Q_PROJ": 2})
    )


@pytest.mark.parametrize("name", ["use_something_new", "something_new_config"])
def test_what_a_newer_version_switches_on_is_refused(name: str, folder: Path) -> None:
    """It may change what the adapter computes; what is off, or says how it was trained, does not."""
    Adapter.open(change(folder, **{name: None}, use_rslora=True, eva_config={"rho": 2.0}, inference_mode=True))
    assert f"{name} is set, which nobody here knows: merge it" in refusal(change(folder, **{name: {"a": 1}}))


def test_all_linear_leaves_out_what_is_excluded(base: Path, folder: Path) -> None:
    """As somebody may write it; PEFT writes the names."""
    products = [f"model.layers.{n}.{name}" for n in range(2) for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.x")]
    change(folder, target_modules="all-linear")
    with pytest.raises(AdapterError, match=r"lacks the matrices of model.layers.0.mlp.x \(and 1 more\)"):
        Adapter.open(folder).check_complete(products, products)
    Adapter.open(change(folder, exclude_modules=["x"])).check_complete(products, products)
    Adapter.open(change(folder, exclude_modules=r".*\.mlp\.x")).check_complete(products, products)
