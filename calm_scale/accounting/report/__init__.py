"""The FLOPs report: built once as data, then rendered for terminal, Markdown, JSON or a browser."""
