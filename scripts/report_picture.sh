#!/usr/bin/env bash
# The README's picture, docs/assets/report.png: the report of a run of the demo, by Chromium.
#     scripts/report_picture.sh [RUN [FILE]]
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${1:-runs/demo-adapt} file=$(realpath "${2:-docs/assets/report.png}")

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
sandbox=()
[[ $(id -u) != 0 ]] || sandbox=(--no-sandbox)
"$browser" --headless=new --disable-gpu --hide-scrollbars --no-first-run "${sandbox[@]}" \
    --user-data-dir="$profile" --window-size=1200,2560 --virtual-time-budget=5000 \
    --screenshot="$file" "file://$(realpath "$run")/report.html" 2> /dev/null
# A third of the bytes, where Pillow is installed: a page has few colours.
python=.venv/bin/python
[[ -x $python ]] || python=python3
"$python" - "$file" << 'END' || echo "report_picture: kept as it is, since Pillow is not installed" >&2
import sys
from PIL import Image
Image.open(sys.argv[1]).convert("RGB").quantize(128).save(sys.argv[1], optimize=True)
END
echo "$file"
