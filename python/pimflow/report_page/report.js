"use strict";
// Tables of the page, and the controls of its timeline. Everything is text: nothing of the data is HTML.
// Tabulator takes strings for HTML, so it is given elements for all that it shows of the data.
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function figures(value, digits) {
  if (value === null || value === undefined || value === "") return "";
  return Number(value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function plainTable(columns, rows, texts) {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const each of columns) head.append(element("th", each.title, "digits" in each ? "number" : ""));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    const [chosen, ...values] = row;
    if (chosen) line.className = "chosen";
    columns.forEach((each, index) => {
      const number = "digits" in each;
      const text = each.numbered ? texts[values[index]] : values[index];
      line.append(element("td", number ? figures(text, each.digits) : text, number ? "number" : ""));
    });
  }
  const around = element("div", null, "scroll");
  around.append(table);
  return around;
}

function detailsOf(details, columns, texts) {
  const place = element("div", null, "details");
  place.addEventListener("click", (event) => event.stopPropagation());
  for (const part of details) {
    if (part.title) place.append(element("h3", part.title));
    if (part.text) place.append(element("p", part.text));
    if (part.rows) place.append(plainTable(columns, part.rows, texts));
    if (part.pre) place.append(element("pre", part.pre));
  }
  return place;
}

function tableColumn(each) {
  const made = { title: each.title, field: each.field, minWidth: each.least || 70 };
  made.titleFormatter = () => element("span", each.title);
  if (each.widest) made.maxWidth = each.widest;
  if (each.grows) made.widthGrow = each.grows;
  if (each.frozen && window.innerWidth > 700) made.frozen = true;
  if ("digits" in each) {
    made.hozAlign = "right";
    made.headerHozAlign = "right";
    made.sorter = "number";
    made.sorterParams = { alignEmptyValues: "bottom" };
    made.formatter = (cell) => element("span", figures(cell.getValue(), each.digits));
  } else if (each.link) {
    made.formatter = (cell) => {
      const link = element("a", cell.getValue());
      if (cell.getValue()) link.href = cell.getValue();
      return link;
    };
  } else {
    made.formatter = (cell) => element("span", cell.getValue());
    made.tooltip = (_, cell) => cell.getValue() && element("div", cell.getValue());
  }
  if (each.filter === "list") {
    made.headerFilter = "list";
    const itemFormatter = (label) => element("span", label);
    made.headerFilterParams = { valuesLookup: true, clearable: true, itemFormatter };
    made.headerFilterFunc = "=";
    made.headerFilterEmptyCheck = (value) => !value;
  } else if (each.filter) {
    made.headerFilter = "input";
    made.headerFilterPlaceholder = "contains …";
  }
  return made;
}

pimflow.tables = {};
for (const [name, table] of Object.entries(pimflow.data("tables"))) {
  const options = {
    data: table.rows,
    columns: table.columns.map(tableColumn),
    layout: "fitColumns",
    columnDefaults: { headerSortTristate: true, headerWordWrap: true },
    placeholder: "no row matches",
  };
  if (table.rows.length > 40) options.maxHeight = 640;
  if (table.details) {
    options.selectableRows = false;
    options.rowFormatter = (row) => {
      const shown = row.getElement();
      shown.classList.add("tabulator-selectable");
      shown.tabIndex = 0;
      shown.querySelector(":scope > .details")?.remove();
      if (row.getData().open) shown.append(detailsOf(row.getData().details, table.detail_columns, table.texts));
    };
  }
  const made = new Tabulator(document.getElementById(name), options);
  pimflow.tables[name] = made;
  made.on("tableBuilt", () => (document.getElementById(name).dataset.built = "yes"));
  if (table.details) {
    const toggle = (row) => {
      row.getData().open = !row.getData().open;
      row.reformat();
      row.normalizeHeight();
    };
    made.on("rowClick", (_, row) => toggle(row));
    document.getElementById(name).addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !event.target.classList.contains("tabulator-row")) return;
      const row = made.getRows().find((each) => each.getElement() === event.target);
      if (row) toggle(row);
    });
  }
}

// The timeline: what is typed is sought, buttons zoom about the middle of what is shown.
const search = document.getElementById("timeline-search");
function seek() {
  const view = pimflow.views["timeline"];
  if (view) view.signal("search", search.value).runAsync();
}
if (search) {
  search.addEventListener("input", seek);
  pimflow.onTheme.push(seek);
  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => zoomBy(Number(button.dataset.zoom)));
  }
}
function zoomBy(factor) {
  const view = pimflow.views["timeline"];
  const [begin, end] = view.scale("x").domain();
  const middle = (begin + end) / 2;
  const half = ((end - begin) / 2) * factor;
  view.signal("zoom_begin", factor ? [Math.max(0, middle - half), middle + half] : null).runAsync();
}

// Rows of layers: opened by a click or by Enter, and from bars of the timeline and boxes of the network.
function showLayer(name) {
  const table = pimflow.tables.layers;
  const row = table && table.getRows().find((each) => each.getData().name === name);
  if (!row) return;
  table.clearHeaderFilter();
  row.getData().open = true;
  row.reformat();
  row.normalizeHeight();
  table.scrollToRow(row, "top", true).catch(() => {}).then(() => {
    row.getElement().scrollIntoView({ block: "center" });
    row.getElement().focus();
  });
}
function listenToBars() {
  const view = pimflow.views["timeline"];
  if (view) view.addEventListener("click", (_, item) => item && item.datum && showLayer(item.datum.layer));
}
pimflow.onTheme.push(listenToBars);
pimflow.drawn.then(listenToBars);

// The network: a drawing that is moved, enlarged and searched. Names are text, never HTML.
const graph = pimflow.data("graph");
const networkPlace = document.getElementById("network");
if (networkPlace && graph.length) {
  const width = 160, height = 28, margin = 20;
  const svg = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const left = Math.min(...graph.map((each) => each.x)) - margin;
  const right = Math.max(...graph.map((each) => each.x)) + width + margin;
  const bottom = Math.max(...graph.map((each) => each.y)) + height + margin;
  const drawing = svg("svg", { role: "img", "aria-label": "the layers of the network" });
  const shapes = graph.map((layer) => {
    for (const source of layer.reads) {
      const from = graph[source];
      const [x1, y1, x2, y2] = [from.x + width / 2, from.y + height, layer.x + width / 2, layer.y];
      const bend = (y2 - y1) / 2;
      drawing.append(svg("path", { class: "edge", d: `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}` }));
    }
    const box = svg("g", { class: `layer ${layer.kind}`, transform: `translate(${layer.x},${layer.y})` });
    const shown = layer.name.length > 24 ? "…" + layer.name.slice(-23) : layer.name;
    box.append(svg("title", {}, `${layer.name}: ${layer.mode}`), svg("rect", { width, height, rx: 4 }));
    box.append(svg("text", { x: width / 2, y: height / 2 + 4 }, shown));
    box.addEventListener("click", () => moved || showLayer(layer.name));
    return box;
  });
  drawing.append(...shapes);
  networkPlace.append(drawing);
  const ratio = () => networkPlace.clientHeight / Math.max(networkPlace.clientWidth, 1);
  let view, moved = false, grip = null;
  const apply = () => drawing.setAttribute("viewBox", view.map((value) => Math.round(value)).join(" "));
  const start = () => {
    const wide = Math.max(right - left, 900);
    view = [(left + right - wide) / 2, -margin, wide, wide * ratio()];
  };
  const scale = (factor) => {
    if (factor) {
      view = [view[0] + (view[2] * (1 - factor)) / 2, view[1] + (view[3] * (1 - factor)) / 2, view[2] * factor, view[3] * factor];
    } else {
      const wide = Math.max(right - left, (bottom + margin) / ratio());
      view = [(left + right - wide) / 2, -margin, wide, wide * ratio()];
    }
    apply();
  };
  const move = (x, y) => {
    view[0] += x;
    view[1] += y;
    apply();
  };
  start();
  apply();
  pimflow.network = { scale, move, view: () => view };
  drawing.addEventListener("pointerdown", (event) => ((grip = [event.clientX, event.clientY]), (moved = false)));
  window.addEventListener("pointerup", () => (grip = null));
  drawing.addEventListener("pointermove", (event) => {
    if (!grip) return;
    const unit = view[2] / networkPlace.clientWidth;
    if (Math.hypot(event.clientX - grip[0], event.clientY - grip[1]) > 3) moved = true;
    move((grip[0] - event.clientX) * unit, (grip[1] - event.clientY) * unit);
    grip = [event.clientX, event.clientY];
  });
  networkPlace.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    scale(event.deltaY > 0 ? 1.1 : 0.9);
  }, { passive: false });
  networkPlace.addEventListener("keydown", (event) => {
    const step = view[3] / 8;
    const steps = { ArrowUp: [0, -step], ArrowDown: [0, step], ArrowLeft: [-step, 0], ArrowRight: [step, 0] };
    if (event.key === "+" || event.key === "-" || event.key === "0") scale({ "+": 0.8, "-": 1.25, 0: 0 }[event.key]);
    else if (event.key in steps) move(...steps[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  for (const button of document.querySelectorAll("button[data-scale]"))
    button.addEventListener("click", () => scale(Number(button.dataset.scale)));
  document.getElementById("network-search").addEventListener("input", (event) => {
    const sought = event.target.value.toLowerCase();
    const found = graph.map((layer) => layer.name.toLowerCase().includes(sought));
    shapes.forEach((box, index) => box.classList.toggle("faded", Boolean(sought) && !found[index]));
    const first = graph[found.indexOf(true)];
    if (sought && first) {
      view[0] = first.x + width / 2 - view[2] / 2;
      view[1] = first.y + height / 2 - view[3] / 2;
      apply();
    }
  });
}

// Tables as CSV: the rows that are shown, in their order.
pimflow.csv = (name) => {
  const columns = pimflow.data("tables")[name].columns;
  const quote = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [columns.map((each) => quote(each.title))];
  for (const row of pimflow.tables[name].getData("active")) lines.push(columns.map((each) => quote(row[each.field])));
  return lines.map((line) => line.join(",")).join("\n") + "\n";
};
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const field = element("textarea", pimflow.csv(button.dataset.table));
    document.body.append(field); // pages from disk may have no clipboard of their own
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    button.textContent = copied ? "copied" : "not copied";
    setTimeout(() => (button.textContent = "copy as CSV"), 1500);
  });
}

// Keys: / searches, + - 0 zoom the timeline.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  if (event.key === "/" && search) search.focus();
  else if (search && event.key in { "+": 1, "-": 1, 0: 1 }) zoomBy({ "+": 0.5, "-": 2, 0: 0 }[event.key]);
  else return;
  event.preventDefault();
});

document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = pimflow.theme() === "dark" ? "light" : "dark";
  pimflow.draw();
});
