"""HTTP and WebSocket endpoints, one module per resource, and the schemas of their bodies."""
