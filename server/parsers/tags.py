"""The models that write arguments between tags, and their tags."""

from __future__ import annotations

from .formats import Detection
from .tagged import Tags, tagged

_QWEN = Tags(
    section=("<tool_call>", "</tool_call>"),
    function=("<function=", ">"),
    end="</function>",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    lines=True,
    alone=True,
)
_GLM = Tags(
    section=("<tool_call>", "</tool_call>"),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)


def _of_hunyuan(tag: str) -> tuple[str, str]:
    return f"<{tag}:opensource>", f"</{tag}:opensource>"


def _invoked(prefix: str, section: str, flags: tuple[str, str] = ("", "")) -> Tags:
    """<invoke name="…"> and <parameter name="…">, several calls in a section."""
    return Tags(
        section=(f"<{section}>", f"</{section}>"),
        function=(f'<{prefix}invoke name="', '">'),
        end=f"</{prefix}invoke>",
        key=(f'<{prefix}parameter name="', '">'),
        value=("", f"</{prefix}parameter>"),
        shared=True,
        flags=flags,
    )


_FLAGS = (' string="true"', ' string="false"')
FORMATS = (
    tagged("glm45", _GLM, Detection(any=("<arg_key>",)), aliases=("glm47", "glm4_moe", "laguna")),
    tagged(
        "qwen3_coder",
        _QWEN,
        # Seed-OSS and functionary begin calls with the same word.
        Detection(any=("<function=",), none=("<seed:tool_call>", "start_tag")),
        aliases=("qwen3_xml", "mimo", "nemotron3", "step3p5"),
    ),
    tagged(
        "seed_oss",
        Tags(
            section=("<seed:tool_call>", "</seed:tool_call>"),
            function=("<function=", ">"),
            end="</function>",
            key=("<parameter=", ">"),
            value=("", "</parameter>"),
            alone=True,
        ),
        Detection(any=("<seed:tool_call>",)),
    ),
    tagged(
        "minicpm5",
        Tags(
            section=('<function name="', "</function>"),
            function=("", '">'),
            key=('<param name="', '">'),
            value=("", "</param>"),
            quotes=("<![CDATA[", "]]>"),
        ),
        Detection(any=('<param name="',)),
        aliases=("minicpm",),
    ),
    tagged("minimax_m2", _invoked("", "minimax:tool_call"), Detection(any=("<minimax:tool_call>",))),
    tagged(
        "deepseek_v4",
        _invoked("｜DSML｜", "｜DSML｜tool_calls", _FLAGS),
        Detection(any=("｜DSML｜",), none=("function_calls",)),
    ),
    tagged(
        "deepseek_v32",
        _invoked("｜DSML｜", "｜DSML｜function_calls", _FLAGS),
        Detection(any=("｜DSML｜",)),
    ),
    tagged(
        "hunyuan_v3",
        Tags(
            section=_of_hunyuan("tool_calls"),
            function=("<tool_call:opensource>", "<tool_sep:opensource>"),
            end="</tool_call:opensource>",
            key=_of_hunyuan("arg_key"),
            value=_of_hunyuan("arg_value"),
            shared=True,
        ),
        Detection(any=("<tool_sep:opensource>", "'<tool_sep{}>'.format(")),
        aliases=("hy_v3",),
    ),
)
