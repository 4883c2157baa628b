// WHIP sender and WHEP viewer made of libdatachannel (node-datachannel), the WebRTC stack of OBS.
// node datachannel_peer.js send URL FILE: sends the file's access units (each after its length, 32 bits) in a loop, as
//   OBS does: audio first in one bundle, the offer without candidates, H.264 in fragments of 1200 bytes.
// node datachannel_peer.js watch URL: writes RTP packets of H.264 to the standard output (each after its length), sends
//   what it reads, one message a line, on the control channel, and prints what comes there to the standard error.
// Both end with DELETE when their standard input ends.

const { readFileSync } = require("node:fs");
const { createInterface } = require("node:readline");
const rtc = require("node-datachannel");

const [mode, url, file] = process.argv.slice(2);
const SSRC = 70;

function fail(reason) {
  console.error(String(reason));
  process.exit(1);
}

/**
 * Offer in a POST, answer taken; the resource's address. The offer has no candidates, as OBS gathers them after the answer;
 * libdatachannel fails now and then where its peer's packets come before the answer, as they may on one machine.
 */
async function connect(pc) {
  pc.setLocalDescription("offer");
  const headers = { "Content-Type": "application/sdp" };
  const body = pc.localDescription().sdp.replace(/a=(candidate:.*|end-of-candidates)\r\n/g, "");
  const response = await fetch(url, { method: "POST", headers, body });
  if (response.status !== 201) fail(`${response.status}: ${await response.text()}`);
  pc.setRemoteDescription(await response.text(), "answer");
  return new URL(response.headers.get("Location"), url);
}

/** Until the standard input ends: then away, as OBS goes. */
function endWith(pc, resource) {
  process.stdin.on("end", async () => {
    pc.close();
    const { status } = await fetch(resource, { method: "DELETE" });
    process.exit(status === 200 ? 0 : 1);
  });
  process.stdin.resume();
}

function* units(bytes) {
  for (let at = 0; at < bytes.length; at += 4 + bytes.readUInt32BE(at)) {
    yield bytes.subarray(at + 4, at + 4 + bytes.readUInt32BE(at));
  }
}

/** An RTP packet of Opus with 20 ms of silence. */
function silence(number) {
  const packet = Buffer.from([0x80, 111, 0, 0, 0, 0, 0, 0, 0, 0, 0, SSRC, 0xf8, 0xff, 0xfe]);
  packet.writeUInt16BE(number & 0xffff, 2);
  packet.writeUInt32BE((number * 960) >>> 0, 4);
  return packet;
}

async function send(pc) {
  const sound = new rtc.Audio("0", "SendOnly");
  sound.addOpusCodec(111);
  sound.addSSRC(SSRC, "name", "stream", "stream-audio");
  const audio = pc.addTrack(sound);
  const picture = new rtc.Video("1", "SendOnly");
  picture.addSSRC(SSRC + 1, "name", "stream", "stream-video");
  picture.addH264Codec(96);
  const config = new rtc.RtpPacketizationConfig(SSRC + 1, "name", 96, 90000);
  const packetizer = new rtc.H264RtpPacketizer("StartSequence", config, 1200);
  packetizer.addToChain(new rtc.RtcpSrReporter(config));
  packetizer.addToChain(new rtc.RtcpNackResponder());
  const video = pc.addTrack(picture);
  video.setMediaHandler(packetizer);
  endWith(pc, await connect(pc));
  const pictures = [...units(readFileSync(file))];
  let number = 0;
  setInterval(() => {
    if (audio.isOpen()) audio.sendMessageBinary(silence(number));
    if (!video.isOpen()) return;
    config.timestamp = number * 3000;
    video.sendMessageBinary(pictures[number++ % pictures.length]);
  }, 33);
}

async function watch(pc) {
  const channel = pc.createDataChannel("control");
  const picture = new rtc.Video("video", "RecvOnly");
  picture.addH264Codec(96);
  const video = pc.addTrack(picture);
  video.setMediaHandler(new rtc.RtcpReceivingSession());
  video.onMessage((packet) => {
    const length = Buffer.alloc(4);
    length.writeUInt32BE(packet.length);
    process.stdout.write(Buffer.concat([length, packet]));
  });
  channel.onMessage((message) => console.error(message));
  const waiting = []; // lines that were read before the channel was open
  createInterface({ input: process.stdin }).on("line", (line) => {
    if (channel.isOpen()) channel.sendMessage(line);
    else waiting.push(line);
  });
  channel.onOpen(() => waiting.splice(0).forEach((line) => channel.sendMessage(line)));
  endWith(pc, await connect(pc));
}

const peer = new rtc.PeerConnection("peer", { iceServers: [], disableAutoNegotiation: true });
(mode === "send" ? send : watch)(peer).catch(fail);
