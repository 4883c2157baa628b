#!/usr/bin/env bash
# Install the independent WebRTC viewer that tests/interop plays with: libwebrtc in Node, one prebuilt npm package.
# Prints what pytest has to leave out: nothing, or these tests where Node, npm or the package cannot be had.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/interop"

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    say "interop: no Node with npm here, so no independent viewer plays (20 or newer does)"
elif [[ -d node_modules/@roamhq/wrtc ]] ||
    timeout 120 npm install --silent --no-audit --no-fund --no-package-lock >&2; then
    say "interop: $(node --version), @roamhq/wrtc"
    exit 0
else
    say "interop: npm could not install @roamhq/wrtc, so no independent viewer plays"
fi
echo "not interop"
