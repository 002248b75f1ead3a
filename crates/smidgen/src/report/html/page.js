// A cursor that shows the values of the charts, and switches for axis and smoothing. The page works without it.
"use strict";
(() => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const bytes = (value) => {
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return (unit ? value.toFixed(2) : String(value)) + " " + units[unit];
  };
  const plain = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(+value.toPrecision(4));
  const render = { bytes, plain, ms: (value) => plain(value) + " ms", percent: (value) => Math.round(value) + " %" };

  // The reader's choices; they are kept when a live page reloads its content.
  const chosen = { log: false, span: null };

  // The index of the last entry that is not after the wanted one.
  const before = (count, at, wanted) => {
    let low = 0, high = count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (at(middle) <= wanted) low = middle; else high = middle - 1;
    }
    return low;
  };

  const readLines = (data, part) => {
    const x = data.x, span = x.high - x.low, wanted = x.low + part * span, words = [];
    let nearest = null;
    for (const line of data.lines) {
      const points = line.shown.filter((point) => point[1] !== null);
      // A run that ended earlier has no value here.
      if (!line.name || !points.length || wanted - points[points.length - 1][0] > 0.01 * span) continue;
      let index = before(points.length, (i) => points[i][0], wanted);
      if (index + 1 < points.length && points[index + 1][0] - wanted < wanted - points[index][0]) index += 1;
      const [at, value] = points[index];
      if (nearest === null || Math.abs(at - wanted) < Math.abs(nearest - wanted)) nearest = at;
      words.push(line.name + "  " + render[data.unit](value));
    }
    if (nearest === null) return null;
    const place = x.name === "step" ? "step " + plain(nearest) : plain(nearest) + " " + x.name;
    return { part: span ? (nearest - x.low) / span : 0, text: place + "\n" + words.join("\n") };
  };

  const readIntervals = (data, part) => {
    const index = before(data.begin.length, (i) => data.begin[i], part * data.high);
    const rows = data.rows.filter((row) => row.bytes[index] > 0);
    const sum = rows.reduce((total, row) => total + row.bytes[index], 0);
    const lines = rows.reverse().map((row) => row.name + "  " + bytes(row.bytes[index]));
    return { part, text: data.place[index] + "\n" + bytes(sum) + " in use\n" + lines.join("\n") };
  };

  const partOf = (axis, value) => {
    const part = axis.log
      ? Math.log(Math.max(value, axis.low) / axis.low) / Math.log(axis.high / axis.low)
      : (value - axis.low) / (axis.high - axis.low);
    return Math.min(1, Math.max(0, part));
  };

  // The exponential moving average over a span of steps, as in `series.rs`.
  const smooth = (points, span) => {
    const decay = (span - 1) / (span + 1);
    let sum = 0, weight = 0, last = null;
    return points.map(([step, value]) => {
      if (value === null) return [step, null];
      const kept = decay ** (last === null ? 1 : step - last);
      sum = kept * sum + (1 - kept) * value;
      weight = kept * weight + 1 - kept;
      last = step;
      return [step, sum / weight];
    });
  };

  const pathOf = (line, data, axis) => {
    let path = "", isDown = false;
    for (const [step, value] of line.shown) {
      if (value === null) { isDown = false; continue; }
      const x = (1000 * partOf(data.x, step)).toFixed(1), y = (1000 * (1 - partOf(axis, value))).toFixed(1);
      path += (isDown && !line.dots ? "L" : "M") + x + " " + y + (line.dots || line.shown.length === 1 ? "h0" : "");
      isDown = true;
    }
    return path;
  };

  const redraw = (figure, data) => {
    const axis = chosen.log && data.log ? data.log : data.y;
    const plot = figure.querySelector(".plot"), paths = plot.querySelectorAll("path.line");
    data.lines.forEach((line, index) => {
      line.shown = line.averaged && chosen.span !== null ? smooth(line.averaged, chosen.span) : line.points;
      paths[index].setAttribute("d", pathOf(line, data, axis));
    });
    const heights = axis.ticks.map(([value]) => 1 - partOf(axis, value));
    plot.querySelector(".grid").setAttribute("d", heights.map((it) => "M0 " + (1000 * it).toFixed(1) + "H1000").join(""));
    plot.querySelectorAll(".tick.y").forEach((it) => it.remove());
    axis.ticks.forEach(([, label], index) => {
      const tick = document.createElement("span");
      tick.className = "tick y";
      tick.style.bottom = 100 * (1 - heights[index]) + "%";
      tick.textContent = label;
      plot.append(tick);
    });
    plot.querySelectorAll(".level").forEach((it, index) => {
      it.style.bottom = 100 * partOf(axis, data.levels[index]) + "%";
    });
  };

  const attach = (figure) => {
    const data = JSON.parse(figure.querySelector("script.points").textContent);
    const plot = figure.querySelector(".plot");
    const [cursor, readout] = [plot.querySelector(".cursor"), plot.querySelector(".readout")];
    const isLines = data.kind === "lines";
    if (isLines) data.lines.forEach((line) => { line.shown = line.points; });
    const read = isLines ? readLines : readIntervals;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const found = read(data, Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
      if (!found) return;
      cursor.hidden = readout.hidden = false;
      cursor.style.left = 100 * found.part + "%";
      readout.textContent = found.text;
      const isLeft = found.part < 0.5;
      readout.style.left = isLeft ? "calc(" + 100 * found.part + "% + 0.6rem)" : "auto";
      readout.style.right = isLeft ? "auto" : "calc(" + 100 * (1 - found.part) + "% + 0.6rem)";
    });
    plot.addEventListener("pointerleave", () => { cursor.hidden = readout.hidden = true; });
    return isLines ? () => redraw(figure, data) : () => {};
  };

  const attachControls = (controls, redrawAll) => {
    const [log, slider, output] = [".log", ".span", "output"].map((it) => controls.querySelector(it));
    const spans = slider.dataset.spans.split(",").map(Number);
    const say = () => {
      const span = spans[slider.value];
      output.textContent = span === 1 ? "off" : span + " steps";
    };
    log.checked = chosen.log;
    if (chosen.span !== null) slider.value = before(spans.length, (i) => spans[i], chosen.span);
    log.addEventListener("change", () => { chosen.log = log.checked; redrawAll(); });
    slider.addEventListener("input", () => { chosen.span = spans[slider.value]; say(); redrawAll(); });
    say();
    controls.hidden = false;
  };

  const attachAll = () => {
    const redraws = [...document.querySelectorAll("figure.chart")].map(attach);
    const redrawAll = () => redraws.forEach((it) => it());
    document.querySelectorAll(".controls").forEach((it) => attachControls(it, redrawAll));
    if (chosen.log || chosen.span !== null) redrawAll();
  };
  window.smidgen = { attachAll };
  attachAll();
})();
