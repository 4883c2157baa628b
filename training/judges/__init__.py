"""What the embedded model shows, read from its pictures and compared with the prompt."""
