"""The command line: what can be typed. What a command does is in `commands`."""
