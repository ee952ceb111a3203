// Every line of a plan in tables, with the numbers of its sources, and the sources below.

function node(name, text = "", attributes = {}) {
  const found = document.createElement(name);
  found.textContent = text;
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}

// Text whose addresses are links.
function linked(name, text) {
  const found = node(name);
  for (const part of text.split(/(https?:\/\/[^\s;,)]+)/)) {
    found.append(/^https?:/.test(part) ? node("a", part, { href: part }) : part);
  }
  return found;
}

// Roles are named, since a narrow page shows rows as blocks.
function headRow() {
  const found = node("tr", "", { role: "row" });
  for (const [name, kind] of [["", ""], ["median", "plan-number"], ["95 % interval", ""], ["from", ""], ["sources", ""]]) {
    found.append(name ? node("th", name, { role: "columnheader", scope: "col", class: kind }) : node("td", "", { role: "cell" }));
  }
  return found;
}

function bodyRow(row, sources) {
  const [quantity, value, interval, how, refs] = labkitPlan.page_row(row, sources);
  const found = node("tr", "", { role: "row" });
  const cells = { number: value, interval, how, refs: refs.replaceAll(",", ", ") };
  found.append(
    node("th", quantity, { role: "rowheader", scope: "row" }),
    ...Object.entries(cells).map(([name, text]) => node("td", text, { role: "cell", class: `plan-${name}` })),
  );
  return found;
}

function table(heading, rows, sources) {
  const [found, head, body] = [
    node("table", "", { role: "table" }), node("thead", "", { role: "rowgroup" }), node("tbody", "", { role: "rowgroup" }),
  ];
  head.append(headRow());
  body.append(...rows.map((row) => bodyRow(row, sources)));
  found.append(node("caption", heading), head, body);
  const wide = node("div", "", { class: "plan-wide", tabindex: "0", role: "region", "aria-label": heading });
  wide.append(found);
  return wide;
}

function showTables(plan) {
  const sources = [...new Set(plan.lines.flatMap((line) => line.sources))];
  const places = Object.fromEntries(sources.map((source, at) => [source, at + 1]));
  const tables = Object.entries(labkitPlan.GROUPS).map(([group, heading]) =>
    table(heading, plan.lines.filter((line) => line.group === group), places));
  document.getElementById("plan-tables").replaceChildren(...tables);
  document.getElementById("plan-sources").replaceChildren(...sources.map((source) => linked("li", source)));
}
