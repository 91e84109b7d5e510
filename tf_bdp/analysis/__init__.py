"""Commands that turn recorded distances into privacy statements."""
