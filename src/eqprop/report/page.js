"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };

  for (const figure of document.querySelectorAll("figure[data-curves]")) {
    const chart = figure.querySelector(".chart");
    const marker = figure.querySelector(".marker");
    const tip = figure.querySelector(".tip");
    const data = JSON.parse(figure.querySelector("script").textContent);
    const off = new Set();
    const places = new Map();
    for (const s of data.series) for (const p of s.points) places.set(p.epoch, p.x);
    const epochs = [...places.keys()].sort((a, b) => a - b);
    let shown = null;

    const hide = () => {
      shown = null;
      tip.hidden = true;
      marker.replaceChildren();
    };

    const show = (epoch) => {
      const x = places.get(epoch);
      const visible = data.series.filter((s) => !off.has(s.key));
      shown = epoch;
      marker.replaceChildren(make("line", { x1: x, x2: x, y1: data.top, y2: data.bottom }));
      const head = document.createElement("b");
      head.textContent = `epoch ${epoch}`;
      const rows = [head];
      for (const s of visible) {
        const p = s.points.find((q) => q.epoch === epoch);
        if (!p) continue;
        marker.append(make("circle", { cx: p.x, cy: p.y, r: 4, class: s.estimator }));
        const row = document.createElement("span");
        row.className = s.estimator;
        const spread = p.std === null ? "" : ` ± ${p.std.toFixed(2)}`;
        row.textContent = `${s.label} ${p.mean.toFixed(2)}${spread} %`;
        rows.push(row);
      }
      tip.replaceChildren(...rows);
      tip.hidden = false;
      const box = chart.getBoundingClientRect();
      const outer = figure.getBoundingClientRect();
      const scale = box.width / chart.viewBox.baseVal.width;
      const at = box.left - outer.left + x * scale;
      const left = at + 12 + tip.offsetWidth < outer.width ? at + 12 : at - 12 - tip.offsetWidth;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${box.top - outer.top + data.top * scale}px`;
    };

    const nearest = (clientX) => {
      const box = chart.getBoundingClientRect();
      const x = ((clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
      return epochs.reduce((best, e) => (Math.abs(places.get(e) - x) < Math.abs(places.get(best) - x) ? e : best));
    };

    for (const kind of ["pointermove", "pointerdown"]) {
      chart.addEventListener(kind, (event) => show(nearest(event.clientX)));
    }
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      const from = shown === null ? (step > 0 ? -1 : epochs.length) : epochs.indexOf(shown);
      show(epochs[Math.min(Math.max(from + step, 0), epochs.length - 1)]);
    });

    for (const button of figure.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => {
        const key = button.dataset.series;
        const on = off.delete(key) || !off.add(key);
        button.setAttribute("aria-pressed", String(on));
        for (const node of chart.querySelectorAll(`[data-series="${key}"]`)) node.classList.toggle("off", !on);
        if (shown !== null) show(shown);
      });
    }
  }

  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
