"""WHEP viewers: SDP, peer connections, tracks and data channels, on aiortc."""
