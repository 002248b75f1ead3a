#!/usr/bin/env python3
"""Checks a report in Chromium: its size, how fast it opens, how it looks at 1280 and 400 pixels, light and dark.

    python3 benches/report_page.py --smidgen target/release/smidgen --shots shots

Trains a fixture for six steps, replaces its metrics by those of a run of 10,000 steps, and opens the page that
`smidgen report` makes of them; `--page FILE` opens an existing page instead, `--run DIR` makes one of a run. Checks
that the peak of `plan.json` is in the label of the chart, that nothing is wider than the window, that no two labels of
a chart overlap, on a logarithmic axis too, that the switches redraw the loss, that nothing is requested from the network and the console shows no error. Uses only the standard library;
Chromium is controlled over a pipe.
"""

import argparse
import base64
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """[model]
path = "model"
compute = "f32"
[adapter]
rank = 4
[data]
train = "data.jsonl"
format = "tokens"
max_tokens = 64
[train]
batch = 4
steps = 6
[memory]
device = "cpu"
threads = 2
budget = "64MiB"
[output]
dir = "run"
"""


class Chromium:
    """The browser's own protocol, as messages that end in a zero byte, over two pipes."""

    def __init__(self):
        program = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
        if program is None:
            sys.exit("there is no Chromium here: `apt install chromium`")
        self.folder = tempfile.TemporaryDirectory()
        (theirs_in, self.out), (self.into, theirs_out) = os.pipe(), os.pipe()
        # The browser reads at 3 and writes at 4; the shell puts our ends there.
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                   "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={self.folder.name}"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(["sh", "-c", shell, "sh", *command], pass_fds=(theirs_in, theirs_out),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.pending, self.events, self.number, self.session = b"", [], 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") != self.number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def receive(self):
        while b"\0" not in self.pending:
            piece = os.read(self.into, 1 << 20)
            if not piece:
                raise RuntimeError("the browser is gone")
            self.pending += piece
        text, _, self.pending = self.pending.partition(b"\0")
        return json.loads(text)

    def wait_for(self, method):
        while True:
            found = next((event for event in self.events if event.get("method") == method), None)
            if found:
                self.events.remove(found)
                return found
            self.events.append(self.receive())

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def close(self):
        self.session = None
        try:
            self.call("Browser.close")
        except RuntimeError:
            pass
        self.process.wait(timeout=20)
        self.folder.cleanup()


# Labels of a chart that overlap by more than two pixels, and steps less than four pixels apart.
OVERLAPS = """(() => {
  const found = [];
  for (const plot of document.querySelectorAll(".plot")) {
    const labels = [...plot.querySelectorAll(".tick, .level span, .peak-label strong, .peak-label span")]
      .map((it) => ({ text: it.textContent, box: it.getBoundingClientRect(), isStep: it.matches(".tick.x") }))
      .filter((it) => it.box.width > 0);
    labels.forEach((one, i) => labels.slice(i + 1).forEach((other) => {
      const wide = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      const high = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
      const least = one.isStep && other.isStep ? -4 : 2;
      if (wide > least && high > 2) found.push(one.text + " / " + other.text);
    }));
  }
  return found;
})()"""

# The lines of the loss.
PATHS = "[...document.querySelectorAll('#chart-loss path.line')].map((it) => it.getAttribute('d'))"

# Elements wider than the window that are not inside a scrolling element.
TOO_WIDE = """(() => {
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page: " + document.documentElement.scrollWidth);
  for (const it of document.querySelectorAll("main *")) {
    if (it.closest(".scroll, pre, svg, details:not([open])")) continue;
    const right = it.getBoundingClientRect().right;
    if (right > innerWidth + 1) found.push(it.tagName + "." + it.className + " " + Math.round(right));
  }
  return found.slice(0, 8);
})()"""


def look(browser, page, width, scheme, peak, shots, hover):
    """Opens the page once; returns what was measured and what is wrong."""
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.events.clear()
    browser.call("Page.navigate", url=page.as_uri())
    browser.wait_for("Page.loadEventFired")
    load_ms = browser.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(() => {"
                               " const entry = performance.getEntriesByType('navigation')[0];"
                               " done(Math.max(entry.loadEventEnd, performance.now()) - entry.startTime); }, 0)))")
    problems = []
    label = browser.evaluate("document.querySelector('#peak-label')?.textContent ?? ''")
    if not label.startswith(f"peak {peak} "):
        problems.append(f"the label of the peak is {label!r}, not `peak {peak}`")
    problems += [f"overlap: {it}" for it in browser.evaluate(OVERLAPS)]
    problems += [f"too wide: {it}" for it in browser.evaluate(TOO_WIDE)]
    before = browser.evaluate(PATHS)
    browser.evaluate("document.querySelector('.controls .log').click()")
    browser.evaluate("(() => { const it = document.querySelector('.controls .span'); it.value = it.max;"
                     " it.dispatchEvent(new Event('input')); })()")
    after = browser.evaluate(PATHS)
    if any(one == other or "NaN" in other for one, other in zip(before, after)):
        problems.append("the switches do not redraw the loss")
    problems += [f"overlap on a log axis: {it}" for it in browser.evaluate(OVERLAPS)]
    browser.evaluate("document.querySelector('.controls .log').click()")
    if hover:
        browser.evaluate("document.querySelector('#timeline .plot').scrollIntoView({block: 'center'})")
        box = browser.evaluate("(() => { const b = document.querySelector('#timeline .plot').getBoundingClientRect();"
                               " return [b.left + b.width * 0.3, b.top + b.height / 2]; })()")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        readout = browser.evaluate("document.querySelector('#timeline .readout').textContent")
        if " in use" not in readout:
            problems.append(f"the cursor says {readout!r}")
    for event in browser.events:
        params = event.get("params", {})
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            problems.append(f"console: {json.dumps(params)[:300]}")
        if event.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url != page.as_uri() and not url.endswith("/favicon.ico"):
                problems.append(f"network: {url}")
    if shots:
        height = math.ceil(browser.evaluate("document.documentElement.getBoundingClientRect().height"))
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        picture = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        (shots / f"{page.stem}-{width}-{scheme}.png").write_bytes(base64.b64decode(picture))
    return load_ms, problems


def make_run(smidgen, folder, steps):
    """A run folder with a real plan and the metrics of a long run."""
    shutil.copytree(ROOT / "fixtures/llama-gqa-tied", folder, dirs_exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE)
    subprocess.run([smidgen, "train", "recipe.toml", "--quiet"], cwd=folder, check=True)
    run = folder / "run"
    noise = random.Random(7)
    with open(run / "metrics.jsonl", "w") as out:
        for step in range(1, steps + 1):
            loss = 1.1 + 1.6 * math.exp(-step / (steps / 6)) + noise.gauss(0, 0.09)
            lr = 2e-4 * min(1, step / (0.03 * steps)) * (1 - step / steps)
            ms = 800 * math.exp(noise.gauss(0, 0.03)) * (1.6 if step % 997 == 0 else 1)
            norm = math.exp(noise.gauss(-0.4, 0.35)) * (40 if step % 3331 == 0 else 1)
            row = {"step": step, "epoch": step / 1000, "loss": loss, "grad_norm": norm, "lr": lr, "tokens": 8000,
                   "supervised_tokens": 3000, "step_ms": ms, "tokens_per_s": 8e6 / ms, "device_bytes": 16_400_000,
                   "device_free_bytes": 4_000_000_000, "device_peak_bytes": 16_600_000, "arena_peak_bytes": 2_000_000,
                   "pinned_bytes": 0, "host_rss_bytes": 16_400_000, "host_peak_bytes": 16_600_000,
                   "monitor_ms": 0.06}
            out.write(json.dumps(row) + "\n")
            if step % (steps // 20) == 0:
                evaluation = {"step": step, "epoch": step / 1000, "eval_loss": loss + 0.05, "eval_samples": 100,
                              "eval_tokens": 9000, "eval_supervised_tokens": 3000, "eval_ms": 900.0}
                out.write(json.dumps(evaluation) + "\n")
    history = json.loads((run / "run.json").read_text())
    history["total_steps"] = history["parts"][0]["last_step"] = steps
    (run / "run.json").write_text(json.dumps(history))
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smidgen", type=Path, default=ROOT / "target/release/smidgen")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--run", type=Path, help="a run folder to report")
    parser.add_argument("--page", type=Path, help="a page to open; `--peak` says what its label is to be")
    parser.add_argument("--peak")
    parser.add_argument("--shots", type=Path, help="where screenshots go")
    args = parser.parse_args()
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        page, peak = args.page, args.peak
        if page is None:
            smidgen = args.smidgen.resolve()
            run = args.run or make_run(smidgen, Path(scratch), args.steps)
            page = Path(scratch) / f"{run.name}.html"
            subprocess.run([smidgen, "report", run, "--out", page], check=True, stdout=subprocess.DEVNULL)
            peak = format_bytes(json.loads((run / "plan.json").read_text())["peak_bytes"])
        page = page.resolve()
        size = page.stat().st_size
        print(f"{page.name}: {size / 1e6:.3f} MB, peak {peak}")
        browser = Chromium()
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")
        failures = [] if size < 2_000_000 else [f"{size} bytes"]
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                load_ms, problems = look(browser, page, width, scheme, peak, args.shots, hover=True)
                if load_ms >= 1000:
                    problems.append(f"opened in {load_ms:.0f} ms")
                print(f"  {width:4} {scheme:5}  opened in {load_ms:4.0f} ms  {'; '.join(problems) or 'fine'}")
                failures += problems
        browser.close()
    sys.exit(1 if failures else 0)


def format_bytes(count):
    """As the page has it."""
    units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
    unit, name = next(((unit, name) for unit, name in units if count >= unit), (1, "B"))
    return f"{count} B" if unit == 1 else f"{(count * 100 + unit // 2) // unit / 100:.2f} {name}"


if __name__ == "__main__":
    main()
