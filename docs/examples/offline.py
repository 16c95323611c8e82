"""Text without a server: the engine runs inside the program."""

import sys

from vserve import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"

if __name__ == "__main__":  # the engine is a process of its own, which may import this file
    with LLM(model) as llm:
        prompts = ["The capital of France is", "Once upon a time"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
            print(repr(output.prompt), "->", repr(output.outputs[0].text))
