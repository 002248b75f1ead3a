// Polls the server for the state of the run, and reloads the content when it has changed.
"use strict";
(() => {
  const title = document.title;
  let stamp = null;
  const refresh = async () => {
    try {
      const summary = await (await fetch("/metrics", { cache: "no-store" })).json();
      // Does not reload while a slider is being moved.
      if (summary.stamp !== stamp && !document.querySelector(".controls:active")) {
        const content = await (await fetch("/content", { cache: "no-store" })).text();
        const open = [...document.querySelectorAll("details[open]")].map((it) => it.id);
        document.getElementById("content").innerHTML = content;
        for (const id of open) document.getElementById(id)?.setAttribute("open", "");
        window.smidgen.attachAll();
        stamp = summary.stamp;
      }
      const isRunning = summary.eta_s !== null;
      document.title = (isRunning ? Math.floor(100 * summary.steps / summary.total_steps) + " % · " : "") + title;
      document.body.classList.remove("stale");
    } catch {
      document.body.classList.add("stale");
    }
    setTimeout(refresh, 2000);
  };
  setTimeout(refresh, 2000);
})();
