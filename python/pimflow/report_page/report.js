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

function plainTable(columns, rows) {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const each of columns) head.append(element("th", each.title, "digits" in each ? "number" : ""));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    if (row.chosen) line.className = "chosen";
    for (const each of columns) {
      const number = "digits" in each;
      const text = number ? figures(row[each.field], each.digits) : row[each.field];
      line.append(element("td", text, number ? "number" : ""));
    }
  }
  const around = element("div", null, "scroll");
  around.append(table);
  return around;
}

function detailsOf(details) {
  const place = element("div", null, "details");
  place.addEventListener("click", (event) => event.stopPropagation());
  for (const part of details) {
    if (part.title) place.append(element("h3", part.title));
    if (part.text) place.append(element("p", part.text));
    if (part.columns) place.append(plainTable(part.columns, part.rows));
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
      shown.querySelector(":scope > .details")?.remove();
      if (row.getData().open) shown.append(detailsOf(row.getData().details));
    };
  }
  const made = new Tabulator(document.getElementById(name), options);
  pimflow.tables[name] = made;
  made.on("tableBuilt", () => (document.getElementById(name).dataset.built = "yes"));
  if (table.details) {
    made.on("rowClick", (_, row) => {
      row.getData().open = !row.getData().open;
      row.reformat();
      row.normalizeHeight();
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

document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = pimflow.theme() === "dark" ? "light" : "dark";
  pimflow.draw();
});
