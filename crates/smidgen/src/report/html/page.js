// A cursor that reads values off the charts. The page is whole without it.
"use strict";
(() => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const bytes = (value) => {
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return (unit ? value.toFixed(2) : String(value)) + " " + units[unit];
  };
  const plain = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(+value.toPrecision(4));
  const render = { bytes, plain, ms: (value) => plain(value) + " ms" };

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
    const wanted = data.low + part * (data.high - data.low);
    const words = [];
    let step = null;
    for (const line of data.lines) {
      const points = line.points;
      if (!points.length) continue;
      let index = before(points.length, (i) => points[i][0], wanted);
      if (index + 1 < points.length && points[index + 1][0] - wanted < wanted - points[index][0]) index += 1;
      if (step === null) step = points[index][0];
      words.push(line.name + "  " + render[data.unit](points[index][1]));
    }
    if (step === null) return null;
    const span = data.high - data.low;
    return { part: span ? (step - data.low) / span : 0, text: "step " + plain(step) + "\n" + words.join("\n") };
  };

  const readStretches = (data, part) => {
    const index = before(data.begin.length, (i) => data.begin[i], part * data.high);
    const rows = data.rows.filter((row) => row.bytes[index] > 0);
    const sum = rows.reduce((total, row) => total + row.bytes[index], 0);
    const lines = rows.reverse().map((row) => row.name + "  " + bytes(row.bytes[index]));
    return { part, text: data.place[index] + "\n" + bytes(sum) + " alive\n" + lines.join("\n") };
  };

  const attach = (figure) => {
    const data = JSON.parse(figure.querySelector("script.points").textContent);
    const plot = figure.querySelector(".plot");
    const [cursor, readout] = [plot.querySelector(".cursor"), plot.querySelector(".readout")];
    const read = data.kind === "lines" ? readLines : readStretches;
    const hide = () => { cursor.hidden = readout.hidden = true; };
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
    plot.addEventListener("pointerleave", hide);
  };

  const attachAll = () => document.querySelectorAll("figure.chart").forEach(attach);
  window.smidgen = { attachAll };
  attachAll();
})();
