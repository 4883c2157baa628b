"""What can be encoded here, chosen by trying; formats and their limits."""

from __future__ import annotations

import av
import pytest

from streamdiff.errors import ConfigError
from streamdiff.server.media import encoder as codecs
from streamdiff.server.media.encoder import Format


def test_the_default_bit_rate_fits_size_and_pace() -> None:
    assert Format(512, 512, 40.0).bitrate_bps == pytest.approx(3_670_016)
    assert Format(128, 128, 40.0, 2).bitrate_bps == 1_000_000
    assert Format(1920, 1080, 60.0).bitrate_bps == 12_000_000
    assert Format(64, 64, 40.0, 1, 250_000).bitrate_bps == 250_000


def test_an_odd_size_is_refused_before_anything_is_encoded() -> None:
    with pytest.raises(ConfigError):
        Format(63, 64, 40.0, 1)
    Format(63, 63, 40.0, 2)


def test_nvenc_is_taken_only_where_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = list[str](), codecs._open

    def fails(name: codecs.Library, fmt: Format) -> object:
        opened.append(name)
        if name == "h264_nvenc":
            raise av.error.PermissionError(1, "Operation not permitted")
        return real(name, fmt)

    monkeypatch.setattr(codecs, "_open", fails)
    codecs.fault.cache_clear()
    try:
        assert codecs.choose("h264") == ("h264",) and codecs.library("h264") == "libx264"
        assert codecs.choose("auto") == ("h264", "vp8")
        assert opened == ["h264_nvenc", "libx264", "libvpx"], "each is opened once"
    finally:
        codecs.fault.cache_clear()


def test_a_codec_that_cannot_be_made_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "fault", lambda name: None if name == "libvpx" else "gone")
    with pytest.raises(ConfigError):
        codecs.choose("h264")
    assert codecs.choose("auto") == ("vp8",)
