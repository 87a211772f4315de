"use strict";
(() => {
  document.documentElement.classList.add("js");
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const SVG = "http:" + "//www.w3.org/2000/svg";
  const GIB = 2 ** 30;

  const format = (bytes) => {
    const units = [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 1024]];
    for (const [unit, scale] of units) if (bytes >= scale * 0.9999) return (bytes / scale).toFixed(2) + " " + unit;
    return bytes + " B";
  };

  class Chart {
    constructor(svg, series) {
      this.svg = svg; this.series = series; this.low = 0; this.high = series.count;
      this.box = svg.querySelector("clipPath rect");
      for (const side of ["x", "y", "width", "height"]) this["box_" + side] = +this.box.getAttribute(side);
      this.cursor = svg.querySelector(".cursor");
      this.tip = document.createElement("div");
      this.tip.className = "tip"; this.tip.hidden = true;
      svg.parentNode.appendChild(this.tip);
      this.at = -1;
      this.listen();
    }
    x(event) { return this.box_x + this.box_width * (event - this.low) / (this.high - this.low); }
    y(bytes) { return this.box_y + this.box_height * (1 - bytes / this.series.top); }
    eventAt(pointer) {
      const rect = this.svg.getBoundingClientRect();
      const x = (pointer.clientX - rect.left) * this.svg.viewBox.baseVal.width / rect.width;
      const share = Math.min(1, Math.max(0, (x - this.box_x) / this.box_width));
      return this.low + share * (this.high - this.low);
    }
    pointAt(event) {
      const events = this.series.events;
      let low = 0, high = events.length - 1;
      while (low < high) { const middle = (low + high + 1) >> 1; if (events[middle] <= event) low = middle; else high = middle - 1; }
      return low;
    }
    draw() {
      const events = this.series.events, last = events.length;
      const edges = events.concat([this.series.count]).map((event) => this.x(event).toFixed(1));
      let below = new Array(last).fill(0);
      for (const path of this.svg.querySelectorAll(".areas path")) {
        const values = this.series.bytes[path.dataset.key];
        if (hidden.has(path.dataset.key)) { path.setAttribute("visibility", "hidden"); continue; }
        path.removeAttribute("visibility");
        const above = below.map((bytes, i) => bytes + values[i]);
        path.setAttribute("d", this.area(edges, below, above));
        below = above;
      }
      this.lines(edges);
    }
    area(edges, below, above) {
      const last = above.length;
      let d = `M${edges[0]},${this.y(above[0]).toFixed(1)}`;
      for (let i = 0; i < last; i++) d += `H${edges[i]}V${this.y(above[i]).toFixed(1)}`;
      d += `H${edges[last]}`;
      for (let i = last - 1; i >= 0; i--) d += `V${this.y(below[i]).toFixed(1)}H${edges[i]}`;
      return d + "Z";
    }
    lines(edges) {
      const whole = this.low === 0 && this.high === this.series.count && hidden.size === 0;
      const reserved = this.svg.querySelector(".reserved");
      if (reserved) {
        let d = `M${edges[0]},${this.y(this.series.reserved[0]).toFixed(1)}`;
        this.series.reserved.forEach((bytes, i) => { d += `H${edges[i]}V${this.y(bytes).toFixed(1)}`; });
        reserved.setAttribute("d", d + `H${edges[edges.length - 1]}`);
      }
      for (const part of [".peak", ".phases", ".ticks"]) this.svg.querySelector(part).setAttribute("visibility", whole ? "visible" : "hidden");
    }
    show(point) {
      this.at = point;
      const x = this.x(this.series.events[point]);
      this.cursor.setAttribute("x1", x); this.cursor.setAttribute("x2", x); this.cursor.setAttribute("visibility", "visible");
      this.fillTip(point);
      const rect = this.svg.getBoundingClientRect(), left = x * rect.width / this.svg.viewBox.baseVal.width;
      this.tip.hidden = false;
      const width = this.tip.offsetWidth;
      this.tip.style.left = Math.max(0, left + 14 + width > rect.width ? left - width - 14 : left + 14) + "px";
      this.tip.style.top = rect.top - this.svg.parentNode.getBoundingClientRect().top + 34 + "px";
    }
    fillTip(point) {
      const event = this.series.events[point];
      const phase = (this.series.phases.find(([, first, last]) => first <= event && event <= last) || [""])[0];
      const table = document.createElement("table");
      let total = 0;
      const rows = [];
      for (const [key, values] of Object.entries(this.series.bytes)) {
        if (hidden.has(key)) continue;
        total += values[point];
        if (values[point] > 0) rows.unshift([key, data.labels[key], format(values[point])]);
      }
      rows.push(["", "Shown together", format(total)]);
      if (this.series.reserved) rows.push(["", "Reserved", format(this.series.reserved[point])]);
      for (const [key, label, bytes] of rows) {
        const row = table.insertRow(), name = row.insertCell(), number = row.insertCell();
        if (key) { const swatch = document.createElement("span"); swatch.className = "swatch fill-" + key; name.append(swatch); }
        name.append(label); number.append(bytes); number.className = "number";
      }
      const head = document.createElement("div");
      head.textContent = `event ${event} of ${this.series.count}${phase ? ", " + phase : ""}`;
      this.tip.replaceChildren(head, table);
    }
    hide() { this.tip.hidden = true; this.cursor.setAttribute("visibility", "hidden"); }
    zoom(low, high) {
      if (high - low < 4) return;
      this.low = low; this.high = high; this.hide(); this.draw();
    }
    listen() {
      let start = null, mark = null;
      const drop = () => { start = null; if (mark) { mark.remove(); mark = null; } };
      this.svg.addEventListener("pointerdown", (pointer) => { if (pointer.pointerType === "mouse") start = this.eventAt(pointer); });
      this.svg.addEventListener("pointermove", (pointer) => {
        const event = this.eventAt(pointer);
        this.show(this.pointAt(event));
        if (start === null) return;
        if (!mark) { mark = document.createElementNS(SVG, "rect"); mark.setAttribute("class", "select"); this.svg.append(mark); }
        const [a, b] = [Math.min(start, event), Math.max(start, event)];
        const place = { x: this.x(a), y: this.box_y, width: this.x(b) - this.x(a), height: this.box_height };
        for (const [name, value] of Object.entries(place)) mark.setAttribute(name, value);
      });
      this.svg.addEventListener("pointerup", (pointer) => {
        if (start !== null && mark) { const end = this.eventAt(pointer); this.zoom(Math.min(start, end), Math.max(start, end)); }
        drop();
      });
      this.svg.addEventListener("pointerleave", () => { drop(); this.hide(); });
      this.svg.addEventListener("dblclick", () => this.zoom(0, this.series.count));
      this.svg.addEventListener("blur", () => this.hide());
      this.svg.addEventListener("keydown", (key) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[key.key];
        if (key.key === "Escape") this.zoom(0, this.series.count);
        if (step === undefined) return;
        key.preventDefault();
        this.show(Math.min(this.series.events.length - 1, Math.max(0, this.at + step)));
      });
    }
  }

  const charts = Object.entries(data.charts).map(([id, series]) => new Chart(document.getElementById(id), series));
  for (const button of document.querySelectorAll("[data-toggle]")) {
    button.addEventListener("click", () => {
      const key = button.dataset.toggle, off = !hidden.has(key);
      if (off) hidden.add(key); else hidden.delete(key);
      button.setAttribute("aria-pressed", String(!off));
      for (const chart of charts) chart.draw();
    });
  }
  const reset = document.getElementById("reset");
  if (reset) reset.addEventListener("click", () => { for (const chart of charts) chart.zoom(0, chart.series.count); });
})();
