"""Live sessions on the web side: opening, limits, control messages, subscribers, statistics."""
