"""What models write beside plain text: tool calls and reasoning, one file a format. A new file is found.

text_reader and reader are what all formats read with; response_template, response_formats and patterns are those that
a model brings along; tagged, sections, json_list and listed are what several share."""
