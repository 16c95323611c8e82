"""A tokenizer is tried out before anybody is served: its regular expression comes with the model, and one that
backtracks without end would let a short text hold up everybody else, or fail in the middle of a request."""

from __future__ import annotations

import time

from tokenizers import Tokenizer

from ...engine.errors import ConfigError

# Runs of one kind of character, and what ends them: where a bad expression tries every way to divide them.
RUNS = ("a", "A", " ", "1", "\n", "!", "é", "一", "a ", "aA", "a1", " \n", "'s", "<|")
ENDS = ("", "!", "\x00")
LENGTHS = (40, 200, 1000)  # characters; the short ones find the worst in no time
LIMIT = 0.1  # seconds of CPU time; a good tokenizer takes less than a millisecond for the longest


def try_out(core: Tokenizer) -> None:
    """Raises ConfigError."""
    for length in LENGTHS:
        for run in RUNS:
            for end in ENDS:
                problem = _problem(core, run * (length // len(run)) + end)
                if problem is not None:
                    raise ConfigError(
                        f"the tokenizer cannot serve, for {length} characters like {run!r} are too much for it "
                        f"({problem}); mend the regular expression in tokenizer.json, or name another with --tokenizer"
                    )


def _problem(core: Tokenizer, text: str) -> str | None:
    for _ in range(2):  # what takes long does so each time; a machine that has stood still does not
        started = time.thread_time()
        try:
            core.encode(text)
        except BaseException as error:
            if not is_panic(error):
                raise
            return str(error)
        if (seconds := time.thread_time() - started) <= LIMIT:
            return None
    return f"it takes {seconds:.1f} s"


def is_panic(error: BaseException) -> bool:
    """Of the Rust library. The class has no public name, and is none of Exception's."""
    return type(error).__name__ == "PanicException"
