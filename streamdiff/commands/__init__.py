"""What each command does: one module per command, but for `serve` (`server.main`)."""
