"""Programs that measure streamdiff and keep what they measured; run them as `python -m benchmarks.<name>`."""
