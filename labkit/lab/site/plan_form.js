// The page's own part: it reads the form, shows the plan, and keeps both in the address.

const { TABLES, format_number } = labkitPlan;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const MEASURED = ["cpu_ms_per_image", "gil_us_per_image", "kb_per_image"]; // what a file of costs gives
const TYPED_MS = 200; // after the last key
const form = document.getElementById("plan-fields");
const byId = (id) => document.getElementById(`plan-${id}`);
const fields = [...form.elements].filter((each) => each.name && each.type !== "file");
const initial = Object.fromEntries(fields.map((each) => [each.name, each.value]));
let costs = null; // { name, text }
let shown = null; // the plan
let waiting = 0;

class WrongField extends Error {
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

// Reading.

const inputName = (name) => (name === "demand" ? "images_per_s_per_gpu" : name);

function numbers(name, text) {
  const parts = text.split(":").map((part) => part.trim());
  if (parts.length > 3 || !parts.every((part) => NUMBER.test(part))) {
    throw new WrongField(name, `${inputName(name)} must be ${TABLES.numbers}, got '${text}'`);
  }
  const found = parts.map(Number);
  return found.length === 1 ? found[0] : found;
}

function entered() {
  const found = {};
  for (const { name, value, type } of fields) {
    if (value.trim()) found[name] = type === "select-one" ? value : numbers(name, value.trim());
  }
  return found;
}

// Arguments of lk.plan.
function argumentsOf(values) {
  const found = { inputs: {} };
  for (const [name, value] of Object.entries(values)) {
    if (name === "gpu") [found.model, found.gpu] = value.split(", ");
    else if (TABLES.parameters.includes(name)) found[name] = value;
    else found.inputs[name] = value;
  }
  if (costs) found.costs = costs.name;
  return found;
}

const isOwn = (storage) => storage.startsWith("own, ");

function made(given) {
  const found = { ...given };
  if (costs) found.costs = labkitPlan.loadCosts(costs.text, costs.name);
  if (isOwn(found.storage)) found.storage = new labkitPlan.Storage("own storage", {}, found.storage === "own, local");
  return labkitPlan.planned(found);
}

// The field that a message is about: the first input that it names.
function fieldOf(message) {
  if (message.includes("costs of labkit")) return "costs";
  const words = (message.match(/\w+/g) ?? []).map((each) => (each === "images_per_s_per_gpu" ? "demand" : each));
  return words.find((each) => each in initial) ?? null;
}

// Showing.

function showError(name, message) {
  for (const each of form.querySelectorAll(".plan-error")) {
    const text = each.id === `plan-${name}-error` ? message : "";
    if (each.textContent !== text) each.textContent = text;
  }
  for (const each of form.elements) {
    if (each.name && each.name === name) each.setAttribute("aria-invalid", "true");
    else each.removeAttribute("aria-invalid");
  }
  if (name) byId(name).closest("details")?.setAttribute("open", "");
}

function showHints(plan) {
  const used = Object.fromEntries(plan.lines.filter((line) => line.group === "input").map((line) => [line.name, line]));
  for (const { name, value, type } of fields) {
    if (type === "select-one") continue;
    const hint = byId(`${name}-hint`);
    const parts = value === initial[name] ? [hint.dataset.help] : [];
    if (!value.trim()) parts.push(whatIsUsed(name, used[inputName(name)]));
    hint.textContent = parts.filter(Boolean).join("; ");
  }
  byId("gpu-hint").replaceChildren(...publishedSource(form.elements.gpu.value));
  byId("costs-hint").textContent = costs ? `${costs.name}, for ${form.elements.data.value}` : "";
}

function whatIsUsed(name, line) {
  if (!line) return byId(`${name}-hint`).dataset.unknown;
  const interval = line.low === line.high ? "" : ` [${format_number(line.low)}, ${format_number(line.high)}]`;
  return `${line.status}: ${format_number(line.value)}${interval}`;
}

function publishedSource(key) {
  if (!key) return [];
  const { images_per_s, source, url } = labkitPlan.PUBLISHED_TRAINING[key];
  return [`${format_number(images_per_s)} images/s: `, node("a", source, { href: url })];
}

function showPlan(plan, given) {
  shown = plan;
  byId("title").textContent = plan.title;
  byId("sentences").replaceChildren(...[...plan.sentences, ...plan.notes].map((text) => node("p", text)));
  byId("cures").replaceChildren(...plan.cures.map((cure) => node("li", `${cure.text}.`)));
  byId("no-cures").hidden = plan.cures.length > 0;
  byId("call").textContent = callText(given);
  showTables(plan);
  showHints(plan);
  byId("results").hidden = false;
  drawChart(byId("chart"), plan);
}

function showMistake(error) {
  shown = null;
  byId("results").hidden = true;
  const name = error.field ?? fieldOf(error.message);
  showError(name, error.message);
  return name ? "No plan: see the field that is marked." : `No plan: ${error.message}`;
}

function update() {
  let status;
  try {
    const given = argumentsOf(entered());
    const plan = made(given);
    showError(null, "");
    showPlan(plan, given);
    status = `Predicted; the bottleneck is ${plan.bottleneck}.`;
  } catch (error) {
    status = showMistake(error);
  }
  if (byId("status").textContent !== status) byId("status").textContent = status;
}

function changed() {
  clearTimeout(waiting);
  update();
  keepAddress();
}

// The same in Python.

const python = (value) => (Array.isArray(value) ? `(${value.join(", ")})` : JSON.stringify(value));

function storageText(storage) {
  return isOwn(storage) ? `lk.Storage("own storage", is_local=${storage === "own, local" ? "True" : "False"})` : python(storage);
}

function callText({ demand, inputs, storage, ...others }) {
  const given = Object.entries(others).filter(([name, value]) => value !== TABLES.defaults[name]);
  const named = [...given, ...Object.entries(inputs)].map(([name, value]) => `${name}=${python(value)}`);
  const parts = [...(demand === undefined ? [] : [python(demand)]), ...named, `storage=${storageText(storage)}`];
  return `lk.plan(${parts.join(", ")})`;
}

// The address.

function keepAddress() {
  const pairs = fields.filter((each) => each.value.trim() || initial[each.name]).map((each) => [each.name, each.value.trim()]);
  if (costs) pairs.push(["costs", JSON.stringify([costs.name, costs.text])]);
  const hash = `#${new URLSearchParams(pairs)}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (!location.hash.includes("=")) return;
  for (const each of fields) each.value = found.get(each.name) ?? "";
  for (const each of fields) if (each.type === "select-one" && each.selectedIndex < 0) each.value = initial[each.name];
  costs = null;
  try {
    const [name, text] = JSON.parse(found.get("costs"));
    costs = { name: String(name), text: String(text) };
  } catch { /* none, or not ours */ }
  byId("costs-clear").hidden = !costs;
}

// What the reader does.

async function readCosts(event) {
  const [file] = event.target.files;
  if (file) setCosts({ name: file.name, text: compact(await file.text()) });
}

function compact(text) {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text.slice(0, 10000); // refused when it is read
  }
}

function setCosts(found) {
  costs = found;
  byId("costs-clear").hidden = !found;
  if (!found) byId("costs").value = "";
  else for (const name of MEASURED) form.elements[name].value = "";
  changed();
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    byId("copied").textContent = `${what} is copied.`;
  } catch {
    byId("copied").textContent = `This browser does not let a page copy: ${text}`;
  }
}

form.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(changed, TYPED_MS);
});
form.addEventListener("change", (event) => event.target.type !== "file" && changed());
form.addEventListener("submit", (event) => {
  event.preventDefault();
  changed();
});
form.addEventListener("reset", () => setTimeout(() => setCosts(null)));
byId("costs").addEventListener("change", readCosts);
byId("costs-clear").addEventListener("click", () => setCosts(null));
byId("copy-call").addEventListener("click", () => copy(byId("call").textContent, "The call"));
byId("copy-address").addEventListener("click", () => copy(location.href, "The address"));
addEventListener("hashchange", () => {
  readAddress();
  update();
});
new ResizeObserver(() => shown && drawChart(byId("chart"), shown)).observe(byId("results"));

readAddress();
update();
