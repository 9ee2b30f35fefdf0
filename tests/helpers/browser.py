"""Pages in Debian's chromium: what a script sees there, and what does not fit a screen."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")

CATCH = "<head><script>const errors = []; addEventListener('error', (e) => errors.push(e.message));</script>"

# In an iframe as wide as a screen: what lies outside it, and what of a picture lies under its toolbar.
MEASURE = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  const wide = [], name = (e) => e.id || e.textContent.slice(0, 40) || e.tagName;
  if (document.documentElement.scrollWidth > innerWidth) wide.push(`page ${document.documentElement.scrollWidth}`);
  for (const e of document.querySelectorAll("h1, h2, p, li, img, pre, details, .wide, .js-plotly-plot, .main-svg"))
    if (e.getBoundingClientRect().right > innerWidth + 0.5) wide.push(name(e));
  const scrolled = [...document.querySelectorAll(".wide")].filter((e) => e.scrollWidth > e.clientWidth).map(name);
  const covered = [], boxes = (plot, what) => [...plot.querySelectorAll(what)].map((e) => e.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const bars = boxes(plot, ".modebar"), legends = boxes(plot, ".legend"), titles = boxes(plot, ".g-xtitle text");
    const ticks = boxes(plot, ".xtick text");
    const any = (some, others) => some.some((one) => others.some((other) => meet(one, other)));
    if (any(bars, [...legends, ...titles])) covered.push(`${plot.id} toolbar`);
    if (any(titles, [...ticks, ...legends])) covered.push(`${plot.id} title`);
  }
  const plots = document.querySelectorAll(".js-plotly-plot .main-svg").length;
  parent.postMessage(JSON.stringify({width: innerWidth, wide, scrolled, covered, plots}), "*");
}, 500));
</script></body>"""


def browse(page: Path, folder: Path, *options: str) -> str:
    """The document that Debian's chromium made of a page."""
    command = [str(CHROMIUM), "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    command += [
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command += ["--virtual-time-budget=20000", "--window-size=1100,2600"]
    if os.getuid() == 0:
        command.append("--no-sandbox")
    result = subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def look(page: Path, folder: Path, script: str, *options: str) -> dict[str, Any]:
    """What a script sees on a page, and writes as JSON into an element of the id `seen`; options are chromium's."""
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("<head>", CATCH, 1).replace("</body>", script))
    document = browse(probed, folder, "--dump-dom", *options)
    found = re.search(r'<pre id="seen">(.*?)</pre>', document, re.DOTALL)
    assert found, document[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return seen


DARK = "--blink-settings=preferredColorScheme=0"


def picture(page: Path, folder: Path, width: int, path: Path, *options: str) -> None:
    """What a screen of a width shows of a page, 1500 pixels high, as PNG. In an iframe, as in `measure`."""
    outer = folder / "outer.html"
    size = f"width='{width}' height='1500'"
    outer.write_text(f"<body style='margin: 0'><iframe src='{page.as_uri()}' {size} style='border: 0'></iframe>")
    browse(outer, folder, f"--screenshot={path}", f"--window-size={width},1500", "--hide-scrollbars", *options)


def measure(page: Path, folder: Path, width: int) -> dict[str, Any]:
    """What does not fit on a screen of a width; chromium's own window is never narrower than 500 pixels."""
    inner = folder / "inner.html"
    inner.write_text(page.read_text().replace("</body>", MEASURE))
    outer = folder / "outer.html"
    outer.write_text(
        "<body><script>addEventListener('message', (e) => { const seen = document.createElement('pre');"
        "seen.id = 'seen'; seen.textContent = e.data; document.body.appendChild(seen); });</script>"
        f"<iframe src='inner.html' width='{width}' height='2000' style='border: 0'></iframe></body>"
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', browse(outer, folder, "--dump-dom"), re.DOTALL)
    assert found
    seen: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    assert seen["width"] == width
    return seen


if __name__ == "__main__":  # python -m tests.helpers.browser PAGE PICTURE: makes PICTURE-390.png, -1280.png, -dark.png
    with tempfile.TemporaryDirectory() as made:
        for screen, shown, asked in ((390, "390", ()), (1280, "1280", ()), (1280, "dark", (DARK,))):
            drawn = Path(f"{sys.argv[2]}-{shown}.png").resolve()
            picture(Path(sys.argv[1]).resolve(), Path(made), screen, drawn, *asked)
