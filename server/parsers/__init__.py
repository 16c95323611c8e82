"""What models write beside plain text: tool calls and reasoning, one file a format. A new file is found."""
