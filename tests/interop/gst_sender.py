"""A WHIP sender made of GStreamer's webrtcbin. Runs in the system's Python, see `gst_peer`.

`gst_sender.py URL CODEC` sends green until its standard input ends, and takes its leave with DELETE. Whatever goes
wrong ends it with 1 and a reason. `gst_sender.py --check` says what is missing here.
"""

import sys
import threading

from gst_peer import GLib, Gst, GstWebRTC, Peer, main

ENCODERS = {
    "h264": "openh264enc gop-size=30 ! video/x-h264,profile=constrained-baseline ! h264parse config-interval=-1"
    " ! rtph264pay pt=102 ! application/x-rtp,media=video,encoding-name=H264,payload=102",
    "vp8": "vp8enc deadline=1 keyframe-max-dist=30 ! rtpvp8pay pt=96"
    " ! application/x-rtp,media=video,encoding-name=VP8,payload=96",
}


class Sender(Peer):
    """Video until the standard input ends."""

    def __init__(self, url, codec):
        pipeline = Gst.parse_launch(
            "webrtcbin name=out bundle-policy=max-bundle videotestsrc is-live=true pattern=green"
            f" ! video/x-raw,format=I420,width=320,height=240,framerate=30/1 ! {ENCODERS[codec]} ! out."
        )
        super().__init__(url, pipeline, pipeline.get_by_name("out"))
        self.webrtc.connect("on-negotiation-needed", self.on_negotiation)

    def on_negotiation(self, _):
        transceiver = self.webrtc.emit("get-transceiver", 0)
        transceiver.set_property("direction", GstWebRTC.WebRTCRTPTransceiverDirection.SENDONLY)
        self.offer()

    def answered(self, status, answer):
        threading.Thread(target=self.wait, daemon=True).start()

    def wait(self):
        """Until the input ends."""
        sys.stdin.read()
        GLib.idle_add(self.loop.quit)


main(Sender, "videotestsrc openh264enc h264parse rtph264pay vp8enc rtpvp8pay")
