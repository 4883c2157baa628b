"""From frames to packets: playout at an even rate, encoding once per codec, fan-out to all receivers."""
