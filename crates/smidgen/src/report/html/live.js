// Asks the server how the run stands, and for the content where something is new.
"use strict";
(() => {
  let stamp = null;
  const refresh = async () => {
    try {
      const summary = await (await fetch("/metrics", { cache: "no-store" })).json();
      if (summary.stamp !== stamp) {
        const content = await (await fetch("/content", { cache: "no-store" })).text();
        const open = [...document.querySelectorAll("details[open]")].map((it) => it.id);
        document.getElementById("content").innerHTML = content;
        for (const id of open) document.getElementById(id)?.setAttribute("open", "");
        window.smidgen.attachAll();
        stamp = summary.stamp;
      }
      document.body.classList.remove("stale");
    } catch {
      document.body.classList.add("stale");
    }
    setTimeout(refresh, 2000);
  };
  setTimeout(refresh, 2000);
})();
