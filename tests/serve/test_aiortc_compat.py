"""The private names of aiortc that we lean on, and what is said when they are gone."""

from __future__ import annotations

import importlib.metadata

import aiortc.rtcrtpsender
import pytest
from aiortc import RTCRtpSender

from streamdiff.errors import StreamdiffError
from streamdiff.serve import aiortc_compat


def test_the_installed_aiortc_is_fine() -> None:
    aiortc_compat.check()
    assert aiortc.rtcrtpsender.RTP_HISTORY_SIZE == aiortc_compat.RETRANSMIT_PACKETS  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0", "2.0"])
def test_another_version_is_refused_with_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(StreamdiffError, match=r"1\.16.*1\.17.*pip install"):
        aiortc_compat.check()


def test_a_missing_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RTCRtpSender, "_send_keyframe")
    with pytest.raises(StreamdiffError, match="lacks a name"):
        aiortc_compat.check()


def test_loopback_is_offered_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiortc_compat, "_all_host_addresses", lambda use_ipv4, use_ipv6: [])
    assert aiortc_compat.host_addresses(True, True) == ["127.0.0.1"]
    assert aiortc_compat.host_addresses(False, True) == []
    monkeypatch.setattr(aiortc_compat, "_all_host_addresses", lambda use_ipv4, use_ipv6: ["192.0.2.1"])
    assert aiortc_compat.host_addresses(True, True) == ["192.0.2.1"]
