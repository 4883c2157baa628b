"""What a WHEP viewer and a WHIP sender made of GStreamer's webrtcbin share: offer, POST, answer, DELETE. Runs in the
system's Python, which has its bindings (`gi`).
"""

import sys
import urllib.error
import urllib.parse
import urllib.request

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstSdp", "1.0")
gi.require_version("GstWebRTC", "1.0")
from gi.repository import GLib, Gst, GstSdp, GstWebRTC  # noqa: E402

LIMIT_S = 60
PARTS = "webrtcbin nicesrc dtlsdec srtpdec rtpbin"


class Peer:
    """A peer connection that `pipeline` has as its `webrtc` element."""

    def __init__(self, url, pipeline, webrtc):
        self.url, self.pipeline, self.webrtc = url, pipeline, webrtc
        self.resource, self.status = None, 0
        self.loop = GLib.MainLoop()
        webrtc.connect("notify::ice-gathering-state", self.on_gathering)
        webrtc.connect("notify::connection-state", self.on_connection)
        bus = pipeline.get_bus()
        bus.add_signal_watch()
        bus.connect("message::error", lambda _, message: self.fail(str(message.parse_error())))

    def run(self):
        """Play until the end; the process's exit status."""
        GLib.timeout_add_seconds(LIMIT_S, lambda: self.fail(f"not ended within {LIMIT_S} s"))
        self.pipeline.set_state(Gst.State.PLAYING)
        self.begin()
        self.loop.run()
        self.pipeline.set_state(Gst.State.NULL)
        if self.status == 0:
            request = urllib.request.Request(self.resource, method="DELETE")
            with urllib.request.urlopen(request, timeout=20) as response:
                self.deleted(response.status)
        return self.status

    def begin(self):
        """The pipeline plays."""

    def answered(self, status, answer):
        """The offer was answered."""

    def deleted(self, status):
        """The leave was answered."""

    def fail(self, reason):
        """End with a reason."""
        sys.stderr.write(reason + "\n")
        self.status = 1
        self.loop.quit()

    def offer(self):
        """Make an offer, and POST it when all candidates are found."""
        self.webrtc.emit("create-offer", None, Gst.Promise.new_with_change_func(self.on_offer))

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
        self.answered(status, answer)
        _, message = GstSdp.SDPMessage.new_from_text(answer)
        description = GstWebRTC.WebRTCSessionDescription.new(GstWebRTC.WebRTCSDPType.ANSWER, message)
        self.webrtc.emit("set-remote-description", description, None)

    def on_connection(self, *_):
        if self.webrtc.get_property("connection-state") == GstWebRTC.WebRTCPeerConnectionState.FAILED:
            self.fail("the connection has failed")


def main(peer, parts):
    """The process: `--check` says which of PARTS and `parts` are not installed, else a `peer` of the arguments runs."""
    Gst.init(None)
    if sys.argv[1:] != ["--check"]:
        sys.exit(peer(*sys.argv[1:]).run())
    names = [*PARTS.split(), *(name for name in parts.split() if name != "!")]
    if missing := [name for name in names if not Gst.ElementFactory.find(name)]:
        sys.exit(f"GStreamer has no {', '.join(missing)}")
