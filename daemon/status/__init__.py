"""What a user sees of a running daemon: the status document, the version table, metrics and the page."""
