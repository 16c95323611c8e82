"""People: HTTP, text, chat templates, command line, metrics page. No tensors."""
