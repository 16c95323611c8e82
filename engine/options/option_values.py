"""What is wrong with the value of an option, in words, where its bounds and choices do not say it."""

from __future__ import annotations

import json
import os

from ..errors import ConfigError
from .option import json_object


def power_of_two(number: int) -> str | None:
    return "it must be a power of two" if number & (number - 1) else None


def rope_scaling(text: str) -> str | None:
    if problem := json_object(text):
        return problem
    if {"rope_type", "type"} & json.loads(text).keys():
        return None
    return 'its "rope_type" is missing, as in \'{"rope_type": "yarn", "factor": 4.0}\''


def kv_events(text: str) -> str | None:
    from .kv_events_settings import problem

    return problem(text)


def speculation(text: str) -> str | None:
    from .speculation import problem

    return problem(text)


def partition(text: str) -> str | None:
    words = text.split(",")
    right = all(word.strip().isdecimal() and int(word) for word in words)
    return None if right else "it must be the number of layers of each stage, such as 12,10,10"


def no_text(text: str) -> str | None:
    return None if text else "it is empty: give it a text, or leave it out"


def no_file(path: str) -> str | None:
    return "it is a file, give a folder" if os.path.isfile(os.path.expanduser(path)) else None


def model(name: str) -> str | None:
    from .model_path import find_model

    try:
        find_model(name)
    except ConfigError as error:
        return str(error)
    return None
