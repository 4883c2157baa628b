"""A WHIP sender made of GStreamer's webrtcbin. Runs in the system's Python, which has its bindings (`gi`).

`gst_sender.py URL CODEC` sends green until its standard input ends, and takes its leave with DELETE. Whatever goes
wrong ends it with 1 and a reason. `gst_sender.py --check` says what is missing here.
"""

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
ENCODERS = {
    "h264": "openh264enc gop-size=30 ! video/x-h264,profile=constrained-baseline ! h264parse config-interval=-1"
    " ! rtph264pay pt=102 ! application/x-rtp,media=video,encoding-name=H264,payload=102",
    "vp8": "vp8enc deadline=1 keyframe-max-dist=30 ! rtpvp8pay pt=96"
    " ! application/x-rtp,media=video,encoding-name=VP8,payload=96",
}
PARTS = "webrtcbin nicesrc dtlsdec srtpdec rtpbin videotestsrc openh264enc h264parse rtph264pay vp8enc rtpvp8pay"


class Sender:
    """Offer, POST, answer, video, DELETE."""

    def __init__(self, url, codec):
        self.url, self.resource, self.status = url, None, 0
        self.loop = GLib.MainLoop()
        self.pipeline = Gst.parse_launch(
            "webrtcbin name=out bundle-policy=max-bundle videotestsrc is-live=true pattern=green"
            f" ! video/x-raw,format=I420,width=320,height=240,framerate=30/1 ! {ENCODERS[codec]} ! out."
        )
        self.webrtc = self.pipeline.get_by_name("out")
        self.webrtc.connect("on-negotiation-needed", self.on_negotiation)
        self.webrtc.connect("notify::ice-gathering-state", self.on_gathering)
        bus = self.pipeline.get_bus()
        bus.add_signal_watch()
        bus.connect("message::error", lambda _, message: self.fail(str(message.parse_error())))

    def run(self):
        """Send until the end; the process's exit status."""
        GLib.timeout_add_seconds(LIMIT_S, lambda: self.fail(f"not ended within {LIMIT_S} s"))
        self.pipeline.set_state(Gst.State.PLAYING)
        self.loop.run()
        self.pipeline.set_state(Gst.State.NULL)
        if self.status == 0:
            urllib.request.urlopen(urllib.request.Request(self.resource, method="DELETE"), timeout=20).close()
        return self.status

    def fail(self, reason):
        """End with a reason."""
        sys.stderr.write(reason + "\n")
        self.status = 1
        self.loop.quit()

    def wait(self):
        """Until the input ends."""
        sys.stdin.read()
        GLib.idle_add(self.loop.quit)

    def on_negotiation(self, _):
        transceiver = self.webrtc.emit("get-transceiver", 0)
        transceiver.set_property("direction", GstWebRTC.WebRTCRTPTransceiverDirection.SENDONLY)
        self.webrtc.emit("create-offer", None, Gst.Promise.new_with_change_func(self.on_offer))

    def on_offer(self, promise):
        reply = promise.get_reply()  # the offer lives as long as this does
        self.webrtc.emit("set-local-description", reply.get_value("offer"), None)

    def on_gathering(self, *_):
        if self.webrtc.get_property("ice-gathering-state") == GstWebRTC.WebRTCICEGatheringState.COMPLETE:
            GLib.idle_add(self.post)

    def post(self):
        offer = self.webrtc.get_property("local-description").sdp.as_text()
        request = urllib.request.Request(self.url, offer.encode(), {"Content-Type": "application/sdp"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                answer = response.read().decode()
                self.resource = urllib.parse.urljoin(self.url, response.headers["Location"])
        except urllib.error.HTTPError as error:
            return self.fail(f"{error.code}: {error.read().decode()}")
        except OSError as error:
            return self.fail(str(error))
        _, message = GstSdp.SDPMessage.new_from_text(answer)
        description = GstWebRTC.WebRTCSessionDescription.new(GstWebRTC.WebRTCSDPType.ANSWER, message)
        self.webrtc.emit("set-remote-description", description, None)
        threading.Thread(target=self.wait, daemon=True).start()


Gst.init(None)
if sys.argv[1:] == ["--check"]:
    if names := [name for name in PARTS.split() if not Gst.ElementFactory.find(name)]:
        sys.exit(f"GStreamer has no {', '.join(names)}")
else:
    sys.exit(Sender(*sys.argv[1:]).run())
