"""The engine as a process: starting, watching and restarting it, and the IPC between it and the server."""
