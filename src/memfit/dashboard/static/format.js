// Numbers as people read them, and elements built from text only: nothing that is received is ever HTML.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]];

export function bytes(count) {
  if (count === null || count === undefined || Number.isNaN(count)) return "unknown";
  const size = Math.abs(count), sign = count < 0 ? "−" : "";
  for (const [unit, scale] of UNITS) if (size >= scale * 0.9999) return `${sign}${(size / scale).toFixed(2)} ${unit}`;
  return `${sign}${Math.round(size)} B`;
}

export function axisBytes(count) {
  const size = Math.abs(count);
  for (const [unit, scale] of UNITS) if (size >= scale * 0.9999) return `${+(count / scale).toFixed(size / scale < 10 ? 2 : 1)} ${unit}`;
  return `${Math.round(count)} B`;
}

export function seconds(value) {
  if (value < 1) return `${(value * 1000).toPrecision(3)} ms`;
  if (value < 60) return `${value.toPrecision(3)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.round(hours / 24)} days`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
export const whole = (count) => (count === null || count === undefined ? "" : Math.round(count).toLocaleString("en"));
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const moment = (at, axis) => (axis === "event" ? `event ${whole(at)}` : clock(at));

// make("li", {class: "x", title: "…"}, "text", element, …): children that are no elements become text.
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

// The children of `parent`, one per item, kept by key: focus, open details and scroll survive an update.
export function keyed(parent, items, keyOf, build, update) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = kept.get(key);
    if (!child) { child = build(item); child.dataset.key = key; }
    kept.delete(key);
    if (child === place) place = place.nextElementSibling; else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of kept.values()) child.remove();
}

export const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };
