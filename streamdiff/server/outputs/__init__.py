"""Where a stream goes beside viewers: files, RTMP, SRT and WHIP."""
