#!/usr/bin/env bash
# Install the third-party clients that tests/interop plays with, where that is ours to do: Node and npm packages
# (libwebrtc and libdatachannel, prebuilt; WHEP players for pages), GStreamer, Firefox, coturn, HAProxy, Janus,
# Prometheus' promtool, and, where PLAY_AIPERF is set, AIPerf in an environment of its own.
# Prints what pytest has to leave out: nothing, or the tests whose viewer cannot be had here. In continuous integration
# (CI is set, as .ci/run does) none may be left out: what cannot be had is an error there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath -m "${VENV:-.venv}")/bin/python
aiperf=$PWD/.venv-aiperf
cd tests/interop

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

lacks() {
    say "interop: $1"
    [[ -z ${CI:-} ]] || { say "interop: and in continuous integration (CI=$CI) nothing is left out"; exit 1; }
    return 1
}

installs() {
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
    say "interop: installing the system packages $*"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null || true
}

NODE=(nodejs npm)

node_found() { command -v node >/dev/null && command -v npm >/dev/null; }

node_plays() {
    node_found || installs "${NODE[@]}" || true
    if ! node_found; then
        lacks "no Node (18.15 or newer) with npm, so its viewers do not play; on Debian: apt install ${NODE[*]}" || return 1
    fi
    if ! cmp -s package.json node_modules/.installed.json; then
        if ! timeout 120 npm install --silent --no-audit --no-fund --no-package-lock >&2; then
            lacks "npm could not install what tests/interop/package.json names, so Node's viewers do not play" || return 1
        fi
        cp package.json node_modules/.installed.json
    fi
    say "interop: $(node --version), @roamhq/wrtc, @eyevinn/webrtc-player, whip-whep, node-datachannel, openai"
}

GSTREAMER=(gstreamer1.0-plugins-good gstreamer1.0-plugins-bad gstreamer1.0-nice gir1.2-gst-plugins-bad-1.0 python3-gi)

gstreamer_found() {
    [[ -x /usr/bin/python3 ]] && /usr/bin/python3 -Es gst_viewer.py --check && /usr/bin/python3 -Es gst_sender.py --check
}

gstreamer_plays() {
    gstreamer_found 2>/dev/null || installs "${GSTREAMER[@]}" || true
    if ! gstreamer_found 2>/dev/null; then
        lacks "no GStreamer for the system's Python, so it does not play; on Debian: apt install ${GSTREAMER[*]}" || return 1
    fi
    say "interop: GStreamer's webrtcbin"
}

# haproxy lies where only root's shell looks
has() { PATH="$PATH:/usr/sbin" command -v "$1" >/dev/null; }

# plays PACKAGE PROGRAM
plays() {
    has "$2" || installs "$1" || true
    has "$2" || lacks "no $1, so it does not play; on Debian: apt install $1" || return 1
    say "interop: $1"
}

AIPERF=0.13.0

aiperf_plays() {
    if [[ $(cat "$aiperf/.installed" 2>/dev/null) != "$AIPERF" ]]; then
        if [[ -z ${PLAY_AIPERF:-} ]]; then
            say "interop: aiperf does not play: it takes 860 MB; PLAY_AIPERF=1 installs it"
            return 1
        fi
        say "interop: installing aiperf $AIPERF in .venv-aiperf (860 MB)"
        if ! { "$python" -m venv --clear "$aiperf" && timeout 600 "$aiperf/bin/python" -m pip install --quiet \
            --disable-pip-version-check --no-compile "aiperf==$AIPERF"; } >&2; then
            lacks "pip could not install aiperf $AIPERF, so it does not play" || return 1
        fi
        echo "$AIPERF" >"$aiperf/.installed"
    fi
    say "interop: aiperf $AIPERF"
}

without=()
node_plays || without+=("not node")
gstreamer_plays || without+=("not gstreamer")
plays firefox-esr firefox-esr || without+=("not firefox")
plays coturn turnserver || without+=("not coturn")
plays haproxy haproxy || without+=("not haproxy")
plays janus janus || without+=("not janus")
plays prometheus promtool || without+=("not promtool")
aiperf_plays || without+=("not aiperf")
words="${without[*]}"
echo "${words// not/ and not}"
