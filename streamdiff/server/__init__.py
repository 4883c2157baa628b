"""The outside world: HTTP, WebRTC, the page, metrics. Knows nothing about tensors, models or how a frame is made."""
