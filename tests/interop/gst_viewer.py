"""A WHEP viewer made of GStreamer's webrtcbin. Runs in the system's Python, which has its bindings (`gi`).

`gst_viewer.py URL CODEC` prints one JSON line for each thing that happens: the answer, each decoded frame, each message
on the control channel. Lines on its standard input go out on that channel; the end of the input ends it. Whatever goes
wrong ends it with 1 and a reason. `gst_viewer.py --check` says what is missing here.
"""

import json
import re
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstSdp", "1.0")
gi.require_version("GstWebRTC", "1.0")
from gi.repository import GLib, Gst, GstSdp, GstWebRTC  # noqa: E402

LIMIT_S = 60
FORMATS = {
    "h264": "encoding-name=H264,payload=102,packetization-mode=(string)1,profile-level-id=(string)42e01f",
    "vp8": "encoding-name=VP8,payload=96",
}
DECODERS = {
    "h264": "rtph264depay ! h264parse ! openh264dec",
    "vp8": "rtpvp8depay ! vp8dec",
}
PARTS = "webrtcbin nicesrc dtlsdec srtpdec sctpdec rtpbin queue videoconvert appsink"


def tell(**facts):
    """One JSON line, whole, from whichever thread."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def missing():
    """The names of the elements that are not installed."""
    names = [*PARTS.split(), *" ! ".join(DECODERS.values()).split(" ! ")]
    return [name for name in names if not Gst.ElementFactory.find(name)]


def mean(data, start, stride, width, rows):
    """The mean of a plane's upper rows."""
    begins = range(start, start + rows * stride, stride)
    return sum(sum(data[begin : begin + width]) for begin in begins) / (width * rows)


class Viewer:
    """Offer, POST, answer, frames, control channel, DELETE."""

    def __init__(self, url, codec):
        self.url, self.codec, self.resource = url, codec, None
        self.frames, self.status = 0, 0
        self.loop = GLib.MainLoop()
        self.pipeline = Gst.Pipeline.new(None)
        self.webrtc = Gst.ElementFactory.make("webrtcbin")
        self.webrtc.set_property("bundle-policy", GstWebRTC.WebRTCBundlePolicy.MAX_BUNDLE)
        self.pipeline.add(self.webrtc)
        self.webrtc.connect("pad-added", self.on_pad)
        self.webrtc.connect("notify::ice-gathering-state", self.on_gathering)
        self.webrtc.connect("notify::connection-state", self.on_connection)
        bus = self.pipeline.get_bus()
        bus.add_signal_watch()
        bus.connect("message::error", lambda _, message: self.fail(str(message.parse_error())))
        self.pipeline.set_state(Gst.State.READY)  # data channels need it
        caps = Gst.Caps.from_string(f"application/x-rtp,media=video,clock-rate=90000,{FORMATS[codec]}")
        self.webrtc.emit("add-transceiver", GstWebRTC.WebRTCRTPTransceiverDirection.RECVONLY, caps)
        self.channel = self.webrtc.emit("create-data-channel", "control", None)
        self.channel.connect("on-message-string", lambda _, text: tell(message=json.loads(text)))
        self.channel.connect("on-open", lambda _: threading.Thread(target=self.pass_on, daemon=True).start())

    def run(self):
        """Play until the end; the process's exit status."""
        GLib.timeout_add_seconds(LIMIT_S, lambda: self.fail(f"not ended within {LIMIT_S} s, {self.frames} frames"))
        self.pipeline.set_state(Gst.State.PLAYING)
        self.webrtc.emit("create-offer", None, Gst.Promise.new_with_change_func(self.on_offer))
        self.loop.run()
        self.pipeline.set_state(Gst.State.NULL)
        if self.status == 0:
            request = urllib.request.Request(self.resource, method="DELETE")
            with urllib.request.urlopen(request, timeout=20) as response:
                tell(deleted=response.status)
        return self.status

    def fail(self, reason):
        """End with a reason."""
        sys.stderr.write(reason + "\n")
        self.status = 1
        self.loop.quit()

    def pass_on(self):
        """What is typed goes out on the channel."""
        for line in sys.stdin:
            GLib.idle_add(self.channel.emit, "send-string", line.strip())
        GLib.idle_add(self.loop.quit)

    # ---- the connection ---------------------------------------------------------------------------------------------

    def on_offer(self, promise):
        reply = promise.get_reply()  # the offer lives as long as this does
        self.webrtc.emit("set-local-description", reply.get_value("offer"), None)

    def on_gathering(self, *_):
        if self.webrtc.get_property("ice-gathering-state") == GstWebRTC.WebRTCICEGatheringState.COMPLETE:
            GLib.idle_add(self.post)

    def post(self):
        offer = self.webrtc.get_property("local-description").sdp.as_text()
        headers = {"Content-Type": "application/sdp"}
        request = urllib.request.Request(self.url, offer.encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                status, answer = response.status, response.read().decode()
                self.resource = urllib.parse.urljoin(self.url, response.headers["Location"])
        except urllib.error.HTTPError as error:
            return self.fail(f"{error.code}: {error.read().decode()}")
        except OSError as error:
            return self.fail(str(error))
        tell(status=status, codec=re.search(r"a=rtpmap:\d+ (\w+)/90000", answer).group(1))
        _, message = GstSdp.SDPMessage.new_from_text(answer)
        description = GstWebRTC.WebRTCSessionDescription.new(GstWebRTC.WebRTCSDPType.ANSWER, message)
        self.webrtc.emit("set-remote-description", description, None)

    def on_connection(self, *_):
        if self.webrtc.get_property("connection-state") == GstWebRTC.WebRTCPeerConnectionState.FAILED:
            self.fail("the connection has failed")

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


Gst.init(None)
if sys.argv[1:] == ["--check"]:
    if names := missing():
        sys.exit(f"GStreamer has no {', '.join(names)}")
else:
    sys.exit(Viewer(*sys.argv[1:]).run())
