"""A WHEP viewer made of GStreamer's webrtcbin. Runs in the system's Python, see `gst_peer`.

`gst_viewer.py URL CODEC` prints one JSON line for each thing that happens: the answer, each decoded frame, each message
on the control channel. Lines on its standard input go out on that channel; the end of the input ends it. Whatever goes
wrong ends it with 1 and a reason. `gst_viewer.py --check` says what is missing here.
"""

import json
import re
import sys
import threading

from gst_peer import GLib, Gst, GstWebRTC, Peer, main

FORMATS = {
    "h264": "encoding-name=H264,payload=102,packetization-mode=(string)1,profile-level-id=(string)42e01f",
    "vp8": "encoding-name=VP8,payload=96",
}
DECODERS = {"h264": "rtph264depay ! h264parse ! openh264dec", "vp8": "rtpvp8depay ! vp8dec"}


def tell(**facts):
    """One JSON line, whole, from whichever thread."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def mean(data, start, stride, width, rows):
    """The mean of a plane's upper rows."""
    begins = range(start, start + rows * stride, stride)
    return sum(sum(data[begin : begin + width]) for begin in begins) / (width * rows)


class Viewer(Peer):
    """Frames and the control channel."""

    def __init__(self, url, codec):
        webrtc = Gst.ElementFactory.make("webrtcbin")
        super().__init__(url, Gst.Pipeline.new(None), webrtc)
        self.codec, self.frames = codec, 0
        webrtc.set_property("bundle-policy", GstWebRTC.WebRTCBundlePolicy.MAX_BUNDLE)
        self.pipeline.add(webrtc)
        webrtc.connect("pad-added", self.on_pad)
        self.pipeline.set_state(Gst.State.READY)  # data channels need it
        caps = Gst.Caps.from_string(f"application/x-rtp,media=video,clock-rate=90000,{FORMATS[codec]}")
        webrtc.emit("add-transceiver", GstWebRTC.WebRTCRTPTransceiverDirection.RECVONLY, caps)
        self.channel = webrtc.emit("create-data-channel", "control", None)
        self.channel.connect("on-message-string", lambda _, text: tell(message=json.loads(text)))
        self.channel.connect("on-open", lambda _: threading.Thread(target=self.pass_on, daemon=True).start())

    def begin(self):
        self.offer()

    def answered(self, status, answer):
        tell(status=status, codec=re.search(r"a=rtpmap:\d+ (\w+)/90000", answer).group(1))

    def deleted(self, status):
        tell(deleted=status)

    def pass_on(self):
        """What is typed goes out on the channel."""
        for line in sys.stdin:
            GLib.idle_add(self.channel.emit, "send-string", line.strip())
        GLib.idle_add(self.loop.quit)

    # ---- the picture ------------------------------------------------------------------------------------------------

    def on_pad(self, _, pad):
        if pad.direction != Gst.PadDirection.SRC:
            return
        decoding = Gst.parse_bin_from_description(
            f"queue ! {DECODERS[self.codec]} ! videoconvert ! video/x-raw,format=I420"
            " ! appsink name=out emit-signals=true sync=false",
            True,
        )
        decoding.get_by_name("out").connect("new-sample", self.on_frame)
        self.pipeline.add(decoding)
        decoding.sync_state_with_parent()
        pad.link(decoding.get_static_pad("sink"))

    def on_frame(self, sink):
        sample = sink.emit("pull-sample")
        caps, buffer = sample.get_caps().get_structure(0), sample.get_buffer()
        width, height = caps.get_value("width"), caps.get_value("height")
        data = buffer.extract_dup(0, buffer.get_size())
        self.frames += 1
        # GStreamer's default layout of I420: rows are padded to four bytes, each plane after the one before.
        stride, half = (width + 3) // 4 * 4, (width // 2 + 3) // 4 * 4
        u = stride * height
        v = u + half * height // 2
        tell(
            frame=self.frames,
            width=width,
            height=height,
            pts_s=buffer.pts / Gst.SECOND,
            yuv=[
                mean(data, 0, stride, width, height // 4),
                mean(data, u, half, width // 2, height // 8),
                mean(data, v, half, width // 2, height // 8),
            ],
        )
        return Gst.FlowReturn.OK


main(Viewer, "sctpdec queue videoconvert appsink " + " ! ".join(DECODERS.values()))
