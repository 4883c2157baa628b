"""Live sessions on the web side: opening and limits, playback, control messages and their receipts, statistics."""
