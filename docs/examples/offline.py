"""Text without a server: the engine runs inside the program. Options of `LLM` are its flags, such as --model."""

import argparse
from pathlib import Path

import vserve
from vserve import LLM, EngineArgs, SamplingParams

DEMO = Path(vserve.__file__).parent / "configs" / "demo"

if __name__ == "__main__":  # the engine is a process of its own, which may import this file
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(description=__doc__))
    parser.set_defaults(model=str(DEMO))
    with LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args())) as llm:
        prompts = ["The capital of France is", "Once upon a time"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
            print(repr(output.prompt), "->", repr(output.outputs[0].text))
