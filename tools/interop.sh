#!/usr/bin/env bash
# Install the viewers of other houses that tests/interop plays with, where that is ours to do: npm packages (libwebrtc in
# Node, prebuilt; WHEP players for pages), and GStreamer, system packages.
# Prints what pytest has to leave out: nothing, or the tests whose viewer cannot be had here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/interop"

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

node_plays() {
    if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
        say "interop: no Node with npm here, so its viewers do not play (20 or newer does)"
        return 1
    fi
    if ! cmp -s package.json node_modules/.installed.json; then
        if ! timeout 120 npm install --silent --no-audit --no-fund --no-package-lock >&2; then
            say "interop: npm could not install what tests/interop/package.json names, so Node's viewers do not play"
            return 1
        fi
        cp package.json node_modules/.installed.json
    fi
    say "interop: $(node --version), @roamhq/wrtc, @eyevinn/webrtc-player, whip-whep"
}

GSTREAMER=(gstreamer1.0-plugins-good gstreamer1.0-plugins-bad gstreamer1.0-nice gir1.2-gst-plugins-bad-1.0 python3-gi)

gstreamer_found() { [[ -x /usr/bin/python3 ]] && /usr/bin/python3 -I gst_viewer.py --check; }

gstreamer_plays() {
    if ! gstreamer_found 2>/dev/null && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "interop: installing the system packages ${GSTREAMER[*]}"
        export DEBIAN_FRONTEND=noninteractive
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${GSTREAMER[@]}"; } >/dev/null || true
        gstreamer_found >&2 || { say "interop: they could not be installed"; exit 1; }
    fi
    if ! gstreamer_found 2>/dev/null; then
        say "interop: no GStreamer for the system's Python, so it does not play; on Debian: apt install ${GSTREAMER[*]}"
        return 1
    fi
    say "interop: GStreamer's webrtcbin"
}

without=()
node_plays || without+=("not node")
gstreamer_plays || without+=("not gstreamer")
words="${without[*]}"
echo "${words// not/ and not}"
