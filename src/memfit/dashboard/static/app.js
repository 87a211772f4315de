// The page: one state from the server, sent whenever it changes; stretches of the timeline are asked for.
import { MemoryChart, Overview, isDark, shareChart, stepsChart } from "./charts.js";
import { bytes, clock, keyed, make, moment, percent, seconds, setText, whole } from "./format.js";

const $ = (id) => document.getElementById(id);
const STRETCHES = [["5 min", 300], ["1 h", 3600], ["1 day", 86400]];
const page = { state: null, paints: {}, subject: null, range: null, follow: null, at: null, sites: [], seen: null, steps: null, share: null };

async function ask(question, parameters = {}) {
  const shown = Object.entries(parameters).filter(([, value]) => value !== null && Number.isFinite(value) || typeof value === "string");
  const answer = await fetch(`api/${question}?${new URLSearchParams(shown)}`);
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return answer.json();
}

// ------------------------------------------------------------------ subjects

function subjects(state) {
  const found = [];
  for (const device of state.devices) {
    const own = state.allocators.filter((one) => (one.uuid && device.uuid ? one.uuid === device.uuid : one.index === device.index && !device.mig));
    if (!own.length || device.name) found.push({ key: device.key, device, allocator: null, label: device.label, what: device.name || "GPU" });
    for (const allocator of own) found.push({ key: allocator.key, device, allocator, label: allocator.world_size > 1 ? `rank ${allocator.rank}` : allocator.label, what: allocator.alive ? (state.kind === "trace" ? "trace" : allocator.job || "PyTorch") : "ended", long: allocator.label });
  }
  return found;
}
const highest = (one) => Math.max(one.run_peak_bytes ?? 0, one.allocated_peak_bytes ?? 0, one.step_peak_bytes ?? 0) || null;
const current = () => subjects(page.state).find((one) => one.key === page.subject);

function choose(key) {
  if (page.subject === key) return;
  page.subject = key; page.range = null; page.at = null;
  page.follow = page.state.live && page.state.kind !== "trace" ? "all" : null;
  drawState();
  reload();
}

function drawSubjects(state) {
  const all = subjects(state);
  if (!all.some((one) => one.key === page.subject)) {
    const first = all.find((one) => one.allocator?.alive) || all.find((one) => one.allocator) || all[0];
    if (first) choose(first.key);
  }
  $("subjects").classList.toggle("many", all.length > 12);
  keyed($("subjects"), all.length > 1 ? all : [], (one) => one.key, (one) => {
    const button = make("button", { type: "button", class: "subject" }, make("span", { class: "name" }), make("span", { class: "what" }), make("span", { class: "meter" }, make("i")));
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 22"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
    svg.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
    button.append(svg);
    button.addEventListener("click", () => choose(one.key));
    return button;
  }, (button, one) => {
    const total = one.device.total_bytes, used = one.allocator ? one.allocator.reserved_bytes : one.device.used_bytes, share = total && used !== null ? used / total : null;
    setText(button.querySelector(".name"), one.label); button.title = one.long || one.label;
    setText(button.querySelector(".what"), `${one.what} · ${share === null ? "unknown" : `${bytes(used)}, ${percent(share)}`}`);
    button.querySelector(".meter i").style.width = `${100 * Math.min(1, share ?? 0)}%`;
    button.querySelector(".meter").className = `meter${share > 0.97 ? " bad" : share > 0.9 ? " warn" : ""}`;
    button.setAttribute("aria-pressed", String(one.key === page.subject));
    const values = (state.recent[one.key] || []).filter((value) => value !== null), top = Math.max(...values, 1) * 1.05, low = Math.min(...values, top) * 0.95;
    const line = values.map((value, i) => `${(100 * i / Math.max(1, values.length - 1)).toFixed(1)},${(21 - 20 * (value - low) / (top - low || 1)).toFixed(1)}`).join(" ");
    button.querySelector("polyline").setAttribute("points", values.length > 1 ? line : "");
  });
}

// ------------------------------------------------------------------ figures

function tiles(one) {
  const { device, allocator } = one, total = device.total_bytes, list = [];
  const used = device.used_bytes, share = total && used !== null ? used / total : null;
  list.push({ name: page.state.live ? "Used on the device" : "Reserved", value: bytes(used), note: share === null ? device.unknown.used_bytes || "of an unknown total" : `${percent(share)} of ${bytes(total)}`, level: share > 0.97 ? "bad" : share > 0.9 ? "warn" : "" });
  if (!allocator) {
    list.push({ name: "Free", value: bytes(device.free_bytes), note: device.unknown.free_bytes || "" });
    if (device.busy_ratio !== null) list.push({ name: "Busy", value: percent(device.busy_ratio), note: device.temperature_celsius === null ? "" : `${Math.round(device.temperature_celsius)} °C` });
    return list;
  }
  const trend = allocator.trend || {}, grows = trend.growth_bytes_per_step ?? null, soon = trend.seconds_to_oom ?? null;
  const peak = highest(allocator);
  list.push({ name: "Tensors", value: bytes(allocator.allocated_bytes), note: `${bytes(allocator.requested_bytes)} asked for` });
  list.push({ name: "Peak", value: bytes(peak), note: allocator.steps === null ? "the most that was allocated" : `the most in ${whole(allocator.steps)} steps` });
  list.push({ name: "Room left", value: bytes(trend.room_bytes), note: "free on the device and in the cache" });
  list.push({ name: "Growth a step", value: grows === null ? "unknown" : grows > 0 ? `+${bytes(grows)}` : "none", note: grows === null ? "too few steps so far" : grows > 0 ? "held at the end of each step" : "no certain trend", level: grows > 0 ? "warn" : "" });
  list.push({ name: "Full in", value: soon === null ? "—" : seconds(soon), note: soon === null ? "nothing grows, or it is unknown" : "at this growth", level: soon !== null && soon < 7200 ? "bad" : "" });
  const ooms = allocator.ooms, retries = allocator.alloc_retries;
  list.push({ name: "Out of memory", value: ooms === null ? "unknown" : whole(ooms), note: retries === null ? "" : `${whole(retries)} cache flushes`, level: ooms > 0 ? "bad" : "" });
  return list;
}

function drawFigures(one) {
  keyed($("tiles"), tiles(one), (tile) => tile.name, (tile) => make("div", {}, make("dt", {}, tile.name), make("dd"), make("small")), (element, tile) => {
    element.className = `tile ${tile.level || ""}`;
    setText(element.children[1], tile.value); setText(element.children[2], tile.note); element.children[2].title = tile.note;
  });
  const parts = one.device.account, total = parts.reduce((sum, part) => sum + part.bytes, 0);
  const colour = (key) => { const paint = page.paints[key]; return paint ? (isDark() ? paint.dark : paint.light) : "gray"; };
  const label = (part) => page.paints[part.part]?.label || part.label;
  keyed($("account-bar"), parts, (part) => part.part, () => make("span"), (span, part) => {
    span.style.width = `${100 * part.bytes / total}%`; span.style.background = colour(part.part);
    span.title = `${label(part)}: ${bytes(part.bytes)}`;
  });
  $("account-bar").setAttribute("aria-label", parts.map((part) => `${label(part)} ${bytes(part.bytes)}`).join(", "));
  const rows = [...parts, { part: "", label: one.device.total_bytes === total ? "All of the device" : "Known of the device", bytes: total }];
  keyed($("account-parts"), total ? rows : [], (part) => part.part, () => make("li", {}, make("i", { class: "swatch" }), make("span"), make("b"), make("em")), (row, part) => {
    row.className = part.part ? "" : "sum";
    row.children[0].style.background = part.part ? colour(part.part) : "transparent"; row.children[0].style.visibility = part.part ? "" : "hidden";
    setText(row.children[1], part.part ? label(part) : part.label); setText(row.children[2], bytes(part.bytes)); setText(row.children[3], percent(part.bytes / total));
  });
  setText($("account-title"), `Where the memory of ${one.device.label}${one.device.name ? ` (${one.device.name})` : ""} goes${page.state.kind === "trace" ? " at the peak" : ""}`);
}

function drawAlerts(state) {
  setText($("alerts-count"), state.alerts.length ? `${state.alerts.length} on` : "");
  const line = (item) => make("li", {}, make("strong"), " ", make("span"), make("small"));
  const fill = (row, alert, when) => {
    row.className = alert.kind === "ended" ? "ended" : alert.severity;
    setText(row.children[0], alert.alert); setText(row.children[1], alert.text); setText(row.children[2], when);
  };
  keyed($("alerts-now"), state.alerts.length ? state.alerts : [{ none: true, alert: "none", subject: "" }], (alert) => `${alert.alert}/${alert.subject}`, line, (row, alert) => {
    if (alert.none) { row.className = "none"; setText(row.children[1], "Nothing is wrong at this moment."); setText(row.children[0], ""); return; }
    fill(row, alert, `since ${clock(alert.since_seconds)}`);
  });
  $("alerts-past").hidden = !state.changes.length;
  keyed($("alerts-list"), state.changes.slice(0, 100), (alert) => `${alert.kind}/${alert.alert}/${alert.subject}/${alert.at_seconds}`, line, (row, alert) => fill(row, alert, `${alert.kind === "ended" ? "over" : "began"} at ${clock(alert.at_seconds)}`));
  const begun = state.changes.filter((alert) => alert.kind === "fired").map((alert) => `${alert.alert}/${alert.subject}/${alert.at_seconds}`);
  if (page.seen) for (const alert of state.changes) if (alert.kind === "fired" && !page.seen.has(`${alert.alert}/${alert.subject}/${alert.at_seconds}`)) toast(alert);
  page.seen = new Set(begun);
}

function toast(alert) {
  const element = make("div", { class: `toast ${alert.severity}` }, make("strong", {}, alert.alert), " ", alert.text);
  $("toasts").append(element);
  setTimeout(() => element.remove(), 8000);
}

function drawFindings(state) {
  setText($("findings-note"), state.findings_note); $("findings-note").hidden = !state.findings_note;
  setText($("findings-count"), state.findings.length ? `${state.findings.length}` : "");
  keyed($("findings-list"), state.findings, (finding) => `${finding.rule}/${finding.where}/${finding.summary}`, (finding) => make("details", { class: "finding" },
    make("summary", {}, make("span", { class: `badge ${finding.severity}` }, finding.severity), make("span", {}, finding.summary), make("span", { class: "bytes" }, finding.bytes ? bytes(finding.bytes) : "")),
    finding.evidence.length ? make("ul", {}, finding.evidence.map((text) => make("li", {}, text))) : null,
    finding.advice.map(advice)), () => {});
}

function advice(one) {
  const facts = [one.saving_bytes ? `saves ${bytes(one.saving_bytes)}` : null, one.cost, one.risks].filter(Boolean).join(" · ");
  const element = make("div", { class: "advice" }, make("div", {}, one.action), facts ? make("div", { class: "muted" }, facts) : null);
  if (one.typed) {
    const button = make("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => { await navigator.clipboard?.writeText(one.typed); button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); });
    element.append(make("div", { class: "typed" }, make("pre", {}, one.typed), button));
  }
  return element;
}

function drawProcesses(state) {
  const watched = state.allocators.map((one) => ({ key: one.key, gone: !one.alive, cells: [one.label, whole(one.steps), bytes(one.allocated_bytes), bytes(one.reserved_bytes), bytes(highest(one)), one.alloc_retries === null ? "unknown" : whole(one.alloc_retries), one.ooms === null ? "unknown" : whole(one.ooms)] }));
  const pids = new Set(state.allocators.map((one) => one.pid));
  const others = state.processes.filter((one) => !pids.has(one.pid)).map((one) => ({ key: `${one.device}/${one.pid}`, gone: true, cells: [`${one.name ?? "unknown"} (pid ${one.pid})`, "", "", bytes(one.used_bytes), "", "", ""] }));
  keyed($("ranks-rows"), [...watched, ...others], (row) => row.key, (row) => make("tr", {}, row.cells.map((_, i) => make("td", { class: i ? "number" : "" }))), (element, row) => {
    element.className = row.gone ? "gone" : "";
    row.cells.forEach((text, i) => setText(element.children[i], text));
  });
  const host = state.host, facts = [];
  if (host) {
    if (host.total_bytes) facts.push(["Memory", `${bytes(host.total_bytes - host.available_bytes)} of ${bytes(host.total_bytes)}`]);
    if (host.shm_total_bytes) facts.push(["/dev/shm", `${bytes(host.shm_used_bytes)} of ${bytes(host.shm_total_bytes)}`]);
    if (host.rss_bytes) facts.push(["Watched processes", bytes(host.rss_bytes)]);
    if (host.pinned_bytes) facts.push(["Pinned", bytes(host.pinned_bytes)]);
  }
  $("host-facts").replaceChildren(...facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  const unknown = state.devices.flatMap((device) => Object.entries(device.unknown).filter(([name]) => /^(total|used|free)_bytes$/.test(name)).map(([, reason]) => `${device.label}: memory is unknown (${reason})`));
  $("notes").replaceChildren(...[...new Set([...state.notes, ...unknown])].map((text) => make("li", {}, text)));
}

function drawState() {
  const { state } = page;
  if (!state) return;
  document.title = `${state.alerts.some((alert) => alert.severity === "error") ? "✗ " : ""}${state.title} · memfit`;
  setText($("title"), state.title);
  setText($("clock"), clock(state.time_seconds));
  drawSubjects(state);
  const one = current();
  for (const id of ["tiles", "account", "timeline", "steps", "fragmentation", "sites", "ranks"]) $(id).hidden = !one;
  if (one) drawFigures(one);
  drawAlerts(state); drawFindings(state); drawProcesses(state);
}

// ------------------------------------------------------------------ timeline

const chart = new MemoryChart($("timeline-plot"), { select: look, wheel: zoom, pick, hovered: () => {} });
const overview = new Overview($("timeline-overview"), look);
let whole_ = null, loading = false, again = false, timer = 0;

function look(begin, end) {
  if (begin === null || !whole_) { page.range = null; page.follow = page.state.live ? "all" : null; return reload(); }
  const { first, last } = whole_, least = whole_.axis === "event" ? 8 : 2;
  let low = Math.max(first, Math.min(begin, end)), high = Math.min(last, Math.max(begin, end));
  if (high - low < least) { const middle = (low + high) / 2; low = middle - least / 2; high = middle + least / 2; }
  page.range = { begin: low, end: high }; page.follow = null;
  overview.mark(page.range);
  chart.range = page.range;
  if (chart.chart) chart.rescale();
  later();
}
function zoom(factor, at) {
  if (!whole_) return;
  const { begin, end } = shown(), centre = at ?? (begin + end) / 2, width = Math.min((end - begin) * factor, whole_.last - whole_.first);
  const low = Math.max(whole_.first, Math.min(centre - (centre - begin) / (end - begin || 1) * width, whole_.last - width));
  if (width >= whole_.last - whole_.first) look(null); else look(low, low + width);
}
function pan(share) {
  if (!whole_) return;
  const { begin, end } = shown(), width = end - begin, low = Math.max(whole_.first, Math.min(begin + share * width, whole_.last - width));
  look(low, low + width);
}
function shown() {
  if (page.range) return page.range;
  const { first, last } = whole_ || { first: 0, last: 1 };
  return typeof page.follow === "number" ? { begin: Math.max(first, last - page.follow), end: last } : { begin: first, end: last };
}
const later = () => { clearTimeout(timer); timer = setTimeout(reload, 90); };

async function reload() {
  if (!page.subject) return;
  if (loading) { again = true; return; }
  loading = true;
  try {
    const subject = page.subject, points = Math.round($("timeline-plot").clientWidth * (page.state.kind === "trace" ? 1.5 : 0.6));
    if (!whole_ || whole_.subject !== subject || page.state.live || !page.state.ended) whole_ = { ...(await ask("timeline", { subject, points: 600 })), subject };
    const { begin, end } = shown(), complete = whole_.axis === "event" ? whole_.x.length > whole_.last : whole_.x.length < 600;
    const all = complete && begin <= whole_.first && end >= whole_.last;
    const data = all ? whole_ : await ask("timeline", { subject, begin, end: end + (whole_.axis === "event" ? 1 : 0.001), points });
    if (subject === page.subject) { drawTimeline(data); await drawSteps(subject); await drawSites(); }
  } catch (error) { setText($("timeline-range"), `could not be loaded: ${error.message}`); }
  loading = false;
  if (again) { again = false; reload(); }
}

function drawTimeline(data) {
  const empty = data.x.length < 1;
  for (const id of ["timeline-plot", "timeline-overview", "timeline-legend"]) $(id).hidden = empty;
  $("timeline-empty").hidden = !empty;
  setText($("timeline-empty"), "There is no history yet: memfit.watch() in the program, or memfit monitor, keeps it.");
  setText($("timeline-title"), data.axis === "event" ? "Memory over the events of the trace" : "Memory over time");
  $("to-peak").hidden = data.axis !== "event";
  if (empty) return;
  chart.range = shown();
  chart.show(data, page.paints);
  overview.show(whole_, chart.range);
  const { begin, end } = chart.range;
  setText($("timeline-range"), data.axis === "event" ? `events ${whole(begin)} to ${whole(end)} of ${whole(whole_.last + 1)}` : `${clock(begin)} to ${clock(end)}`);
  drawLegend(data); drawStretches(data); drawFragmentation(data);
}

function drawLegend(data) {
  const items = [...data.bands.map((band) => ({ ...band, kind: "band" })), ...data.lines.map((line) => ({ ...line, kind: "line" }))];
  keyed($("timeline-legend"), items, (item) => item.key, (item) => {
    const button = make("button", { type: "button", "aria-pressed": "true" }, make("i", { class: item.kind === "band" ? "swatch" : "dash" }), item.label);
    button.addEventListener("click", () => { chart.hidden.has(item.key) ? chart.hidden.delete(item.key) : chart.hidden.add(item.key); chart.show(chart.data, page.paints); drawLegend(chart.data); });
    return button;
  }, (button, item) => {
    button.setAttribute("aria-pressed", String(!chart.hidden.has(item.key)));
    if (item.kind === "band") button.firstChild.style.background = chart.colour(item.key); else button.firstChild.style.color = chart.lineColour(item.key);
  });
}

function drawStretches(data) {
  const offered = data.axis === "time" && page.state.live ? STRETCHES.filter(([, length], i) => i === 0 || whole_.last - whole_.first > STRETCHES[i - 1][1]) : [];
  keyed($("stretches"), offered, ([name]) => name, ([name, length]) => {
    const button = make("button", { type: "button", title: `Follow the last ${name}` }, name);
    button.addEventListener("click", () => { page.range = null; page.follow = length; reload(); });
    return button;
  }, (button, [, length]) => button.setAttribute("aria-pressed", String(page.follow === length && !page.range)));
}

function drawFragmentation(data) {
  const known = data.ratio?.some((value) => value !== null);
  $("fragmentation-plot").hidden = !known;
  const one = current()?.allocator, stranded = one?.inactive_split_bytes;
  setText($("fragmentation-note"), known && data.axis === "event"
    ? "Share of what PyTorch reserved that no tensor uses. Where the free pieces lie, memfit replay tells, under every setting."
    : known ? `Share of the free cache that is not its largest piece (${bytes(one?.largest_free_bytes)}); ${bytes(stranded)} are stranded in segments in use.`
    : data.axis === "event" ? "This trace has no segments, so what PyTorch reserved is unknown." : "Not known: nobody has walked over the blocks of this process.");
  if (known) page.share = shareChart($("fragmentation-plot"), page.share, data.axis, data.x, data.ratio);
}

async function drawSteps(subject) {
  const data = await ask("steps", { subject, points: 400 });
  $("steps-plot").hidden = !data.count;
  setText($("steps-note"), data.count ? `${whole(data.count)} steps. Red: what is held at the end of each; where it rises, something leaks.` : whole_?.axis === "event" ? "This trace has no steps that can be told apart." : "No steps are counted: watcher.step() at the end of each tells them.");
  if (data.count) page.steps = stepsChart($("steps-plot"), page.steps, data);
}

// ------------------------------------------------------------------ places

async function pick(at) {
  page.at = at;
  page.sites = null;
  await drawSites();
}
async function drawSites() {
  const trace = whole_?.axis === "event", peak = chart.data?.marks?.find((mark) => mark.kind === "peak")?.x ?? whole_?.marks?.find((mark) => mark.kind === "peak")?.x ?? 0;
  const wanted = trace ? Math.round(page.at ?? peak) : 0, key = `${page.subject}/${wanted}/${trace ? "" : page.state.version}`;
  if (page.sitesKey !== key) { page.sitesKey = key; page.found = await ask("moment", { subject: page.subject, at: wanted }); }
  setText($("sites-note"), trace ? `after event ${whole(page.found.at)}${page.at === null ? ", the peak" : ""}; click on the chart to look elsewhere` : "as last looked at");
  drawRows();
}
function drawRows() {
  const sites = [...(page.found?.sites || [])].sort((a, b) => b.held_bytes - a.held_bytes), text = $("filter").value.toLowerCase(), most = Math.max(1, ...sites.map((site) => site.held_bytes));
  const rows = sites.filter((site) => `${site.where} ${site.module} ${site.category}`.toLowerCase().includes(text));
  keyed($("sites-rows"), rows, (site) => `${site.where}|${site.module}|${site.category}`, () => make("tr", {}, make("td", { class: "place" }), make("td"), make("td"), make("td", { class: "number" }), make("td", { class: "number" }), make("td", { class: "share" }, make("i"))), (row, site) => {
    [site.where || "unknown", site.module, page.paints[site.category]?.label || site.category, whole(site.block_count), bytes(site.held_bytes)].forEach((value, i) => setText(row.children[i], value));
    const bar = row.children[5].firstChild, paint = page.paints[site.category] || page.paints.allocated;
    bar.style.width = `${100 * site.held_bytes / most}%`; bar.style.background = paint ? (isDark() ? paint.dark : paint.light) : "";
  });
  const table = $("sites-rows").closest("table");
  for (const name of ["module", "category"]) table.classList.toggle(`no-${name}`, !sites.some((site) => site[name]));
  $("sites-empty").hidden = rows.length > 0;
  setText($("sites-empty"), sites.length ? "No place has this in its name." : "Places are known where PyTorch records them: torch.cuda.memory._record_memory_history(\"state\", stacks=\"python\") in the program, or a trace of memfit dryrun.");
}

// ------------------------------------------------------------------ keys, theme, stream

const ACTS = {
  earlier: () => pan(-0.25), later: () => pan(0.25), closer: () => zoom(0.5), farther: () => zoom(2), all: () => look(null),
  peak: () => { const peak = whole_?.marks?.find((mark) => mark.kind === "peak")?.x; if (peak !== undefined) { const width = Math.max(200, (whole_.last - whole_.first) / 200); page.at = null; look(peak - width / 2, peak + width / 2); } },
  total: () => { chart.toTotal = !chart.toTotal; $("to-total").setAttribute("aria-pressed", String(chart.toTotal)); if (chart.chart) chart.rescale(); },
  theme: () => { const theme = isDark() ? "light" : "dark"; document.documentElement.dataset.theme = theme; try { localStorage.setItem("memfit-theme", theme); } catch { /* not kept */ } repaint(); },
  help: () => $("keys").showModal(), filter: () => $("filter").focus(),
  before: () => neighbour(-1), after: () => neighbour(1),
};
const KEYS = { ArrowLeft: "earlier", ArrowRight: "later", "+": "closer", "=": "closer", "-": "farther", "−": "farther", 0: "all", Home: "all", p: "peak", d: "total", t: "theme", "?": "help", "/": "filter", "[": "before", "]": "after" };

function neighbour(by) {
  const all = subjects(page.state), place = all.findIndex((one) => one.key === page.subject);
  if (all.length) choose(all[(place + by + all.length) % all.length].key);
}
function repaint() { drawState(); if (chart.data) { drawTimeline(chart.data); if (page.subject) drawSteps(page.subject); drawRows(); } }

document.addEventListener("keydown", (event) => {
  if (event.target === $("filter")) { if (event.key === "Escape") { $("filter").value = ""; drawRows(); $("filter").blur(); } return; }
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open || !KEYS[event.key]) return;
  event.preventDefault();
  ACTS[KEYS[event.key]]();
});
for (const button of document.querySelectorAll("[data-act]")) button.addEventListener("click", () => ACTS[button.dataset.act]());
$("theme").addEventListener("click", ACTS.theme); $("help").addEventListener("click", ACTS.help); $("filter").addEventListener("input", drawRows);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new ResizeObserver(() => { if (chart.data) later(); }).observe($("timeline-plot"));

function pill(kind, text) { $("live").className = `pill ${kind}`; setText($("live"), text); }

let drawn = 0;
function receive(state) {
  page.state = state;
  pill(state.ended || !state.live && state.kind !== "trace" ? "" : "live", state.live ? "live" : state.ended ? state.kind : "playing");
  if (state.ended) pill("", state.kind);
  drawState();
  const now = performance.now(), first = !drawn;
  if (first || !state.ended && !page.range && now - drawn > 900) { drawn = now; reload(); }
}

async function begin() {
  page.paints = (await ask("look")).paints;
  const stream = new EventSource("api/stream");
  stream.addEventListener("state", (event) => receive(JSON.parse(event.data)));
  stream.addEventListener("error", () => pill("lost", "no connection, trying again"));
}
begin().catch((error) => pill("lost", error.message));
