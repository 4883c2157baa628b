// A WHEP viewer made of libwebrtc (@roamhq/wrtc): offer, trickled candidates, video, control channel, DELETE.
// node whep_viewer.js URL FRAMES: prints one JSON line, or ends with 1 and a reason.

const { RTCPeerConnection, nonstandard } = require("@roamhq/wrtc");

const [url, wanted] = [process.argv[2], Number(process.argv[3])];
const found = { frames: 0, messages: [], patches: [] };
const deadline = setTimeout(() => fail(`no ${wanted} frames in time: ${JSON.stringify(found)}`), 30000);

function fail(reason) {
  console.error(reason);
  process.exit(1);
}

function mean(plane) {
  return plane.reduce((sum, value) => sum + value, 0) / plane.length;
}

async function main() {
  const pc = new RTCPeerConnection({ iceServers: [] });
  const channel = pc.createDataChannel("control");
  channel.onopen = () => channel.send(JSON.stringify({ type: "ping", id: 7 }));
  channel.onmessage = (event) => found.messages.push(JSON.parse(event.data));
  const transceiver = pc.addTransceiver("video", { direction: "recvonly" });
  const sink = new nonstandard.RTCVideoSink(transceiver.receiver.track);

  let resource = null;
  const waiting = [];
  const trickle = async (candidate) => {
    const username = /a=ice-ufrag:(\S+)/.exec(pc.localDescription.sdp)[1];
    const body = `a=ice-ufrag:${username}\r\na=mid:${candidate.sdpMid}\r\na=${candidate.candidate}\r\n`;
    const headers = { "Content-Type": "application/trickle-ice-sdpfrag" };
    found.patches.push((await fetch(resource, { method: "PATCH", headers, body })).status);
  };
  pc.onicecandidate = ({ candidate }) => {
    if (candidate?.candidate) resource ? trickle(candidate) : waiting.push(candidate);
  };

  await pc.setLocalDescription(await pc.createOffer());
  const headers = { "Content-Type": "application/sdp" };
  const response = await fetch(url, { method: "POST", headers, body: pc.localDescription.sdp });
  if (response.status !== 201) fail(`${response.status}: ${await response.text()}`);
  resource = new URL(response.headers.get("Location"), url);
  const answer = await response.text();
  found.codec = /a=rtpmap:\d+ (\w+)\/90000/.exec(answer)[1];
  await pc.setRemoteDescription({ type: "answer", sdp: answer });
  await Promise.all(waiting.map(trickle));

  sink.onframe = async ({ frame }) => {
    found.frames += 1;
    const ponged = found.messages.some((message) => message.type === "pong" && message.id === 7);
    if (found.frames < wanted || !ponged || found.done) return;
    found.done = true;
    const { width, height, data } = frame;
    const [luma, chroma] = [width * height, (width * height) / 4];
    Object.assign(found, { width, height, y: mean(data.slice(0, luma / 4)) });
    Object.assign(found, { u: mean(data.slice(luma, luma + chroma / 4)) });
    Object.assign(found, { v: mean(data.slice(luma + chroma, luma + (chroma * 5) / 4)) });
    sink.stop();
    pc.close(); // before it says good-bye, as some players do
    found.deleted = (await fetch(resource, { method: "DELETE" })).status;
    clearTimeout(deadline);
    found.messages = found.messages.length;
    console.log(JSON.stringify(found));
    process.exit(0);
  };
}

main().catch((error) => fail(String(error)));
