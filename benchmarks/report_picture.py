"""Draws the picture in docs/replaying.md: the first screens of a report, in a headless Chromium.

python -m benchmarks.report_picture report.html docs/pictures/report.png
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

SIZE = (1100, 1880)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(report: Path, picture: Path) -> None:
    """Write the picture, with a palette, so that it is small."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as scratch:
        drawn = Path(scratch) / "drawn.png"
        subprocess.run(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={scratch}/profile",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                "--virtual-time-budget=30000",
                f"--screenshot={drawn}",
                report.resolve().as_uri(),
            ],
            check=True,
            capture_output=True,
        )
        with Image.open(drawn) as image:
            image.convert("RGB").quantize(256).save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
