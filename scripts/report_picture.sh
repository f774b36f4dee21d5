#!/usr/bin/env bash
# The README's pictures, by Chromium: docs/assets/report.png, the report of a run of the demo; and
# docs/assets/wire.png, one part of the report of a run on two hosts (recipes/two-hosts.yaml).
#     scripts/report_picture.sh [RUN [FILE [PART]]]
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${1:-runs/demo-adapt} file=$(realpath "${2:-docs/assets/report.png}") part=${3:-}

scripts/find_chromium.sh
if [[ ! -f $run/report.html ]]; then
    echo "report_picture: no report in $run; \`make demo\` writes runs/demo-adapt" >&2
    exit 2
fi
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if browser=$(command -v "$name"); then break; fi
done
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
page=$(realpath "$run")/report.html height=2560
if [[ -n $part ]]; then
    { cat "$page"; echo "<style>:has(> [data-part=$part]) > :not([data-part=$part]) {display: none}</style>"; } \
        > "$profile/part.html"
    page=$profile/part.html height=1200
fi
sandbox=()
[[ $(id -u) != 0 ]] || sandbox=(--no-sandbox)
"$browser" --headless=new --disable-gpu --hide-scrollbars --no-first-run "${sandbox[@]}" \
    --user-data-dir="$profile" --window-size=1200,$height --virtual-time-budget=5000 \
    --screenshot="$file" "file://$page" 2> /dev/null
# A third of the bytes, where Pillow is installed: a page has few colours.
python=.venv/bin/python
[[ -x $python ]] || python=python3
"$python" - "$file" "$part" << 'END' || echo "report_picture: kept as it is, since Pillow is not installed" >&2
import sys
from PIL import Image, ImageChops
image = Image.open(sys.argv[1]).convert("RGB")
if sys.argv[2]:  # as much as the part covers
    blank = Image.new("RGB", image.size, image.getpixel((0, 0)))
    left, top, right, bottom = ImageChops.difference(image, blank).getbbox()
    image = image.crop((max(0, left - 40), max(0, top - 40), right + 40, bottom + 40))
image.quantize(128).save(sys.argv[1], optimize=True)
END
echo "$file"
