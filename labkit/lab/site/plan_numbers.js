// What translated Python calls: arithmetic over draws as NumPy does it, and Python's own functions and formats.

const py = {};

py.ValueError = class extends Error {};

// Arithmetic: numbers, and arrays of draws of one length.

const isArray = (value) => value instanceof Float64Array;

function number(value) {
  if (typeof value !== "number") throw new TypeError(`a number is needed, got ${String(value)}`);
  return value;
}

// An operation on numbers as one on draws, too.
function each(operation) {
  return (left, right) => {
    if (!isArray(left) && !isArray(right)) return operation(number(left), number(right));
    const [a, b] = [left, right].map((value) => (isArray(value) ? value : null));
    const found = new Float64Array((a ?? b).length);
    if (!a) for (let at = 0; at < found.length; at++) found[at] = operation(left, b[at]);
    else if (!b) for (let at = 0; at < found.length; at++) found[at] = operation(a[at], right);
    else for (let at = 0; at < found.length; at++) found[at] = operation(a[at], b[at]);
    return found;
  };
}

const addNumbers = each((a, b) => a + b);
py.add = (a, b) => {
  if (typeof a === "string" && typeof b === "string") return a + b;
  return Array.isArray(a) && Array.isArray(b) ? [...a, ...b] : addNumbers(a, b);
};
py.sub = each((a, b) => a - b);
py.mul = each((a, b) => a * b);
py.div = each((a, b) => a / b);
py.mod = each((a, b) => ((a % b) + b) % b);
py.maximum = each(Math.max);
py.minimum = each(Math.min);
py.minimum.reduce = (values) => values.reduce(py.minimum);
py.square = (a) => py.mul(a, a);
py.ceil = (a) => (isArray(a) ? a.map(Math.ceil) : Math.ceil(number(a)));
py.abs = (a) => (isArray(a) ? a.map(Math.abs) : Math.abs(number(a)));
py.ones = (length) => new Float64Array(length).fill(1);
py.ones_like = (a) => (isArray(a) ? py.ones(a.length) : 1);
py.array = (values) => (typeof values[0] === "number" ? Float64Array.from(values) : values);
py.asarray = (value) => value;

const inOrder = new WeakMap(); // draws are asked several times

function sortedDraws(values) {
  if (!isArray(values)) return Float64Array.of(number(values));
  if (!inOrder.has(values)) {
    const isConstant = values.every((value) => value === values[0]);
    inOrder.set(values, isConstant ? values : values.slice().sort());
  }
  return inOrder.get(values);
}

py.quantile = (values, shares) => {
  const sorted = sortedDraws(values);
  const at = (share) => {
    const place = share * (sorted.length - 1);
    const low = Math.floor(place);
    const [a, b, t] = [sorted[low], sorted[Math.min(low + 1, sorted.length - 1)], place - low];
    return t < 0.5 ? a + (b - a) * t : b - (b - a) * (1 - t);
  };
  return Array.isArray(shares) ? shares.map(at) : at(shares);
};
py.median = (values) => py.quantile(values, 0.5);
py.argmin = (rows, axis) => {
  if (axis !== 0) throw new TypeError("argmin is known along the first axis only");
  return rows[0].map((_, column) => rows.reduce((least, row, at) => (row[column] < rows[least][column] ? at : least), 0));
};
py.bincount = (values, minlength) => {
  const found = new Float64Array(minlength);
  values.forEach((value) => { found[value] += 1; });
  return found;
};

// Comparisons.

const ordered = (operation) => (left, right) => operation(number(left), number(right));
py.lt = ordered((a, b) => a < b);
py.le = ordered((a, b) => a <= b);
py.gt = ordered((a, b) => a > b);
py.ge = ordered((a, b) => a >= b);
py.eq = (a, b) => {
  if (isArray(a) || isArray(b)) throw new TypeError("arrays are not compared");
  return Array.isArray(a) ? a.length === b.length && a.every((value, at) => py.eq(value, b[at])) : a === b;
};
py.ne = (a, b) => !py.eq(a, b);

py.truth = (value) => {
  if (isArray(value)) throw new TypeError("an array is neither true nor false");
  return typeof value === "object" && isPlain(value) ? py.list(value).length > 0 : Boolean(value);
};
py.and = (...parts) => parts.reduce((found, part) => (py.truth(found) ? part() : found), true);
py.or = (...parts) => parts.reduce((found, part) => (py.truth(found) ? found : part()), false);

// Lists, sets, and objects as dicts.

function isPlain(value) {
  if (value === null) return false;
  return Array.isArray(value) || value instanceof Set || Object.getPrototypeOf(value) === Object.prototype;
}

py.list = (value) => {
  if (typeof value === "string" || typeof value[Symbol.iterator] === "function") return [...value];
  return Object.keys(value);
};
py.tuple = py.list;
py.iter = py.list;
py.set = (value = []) => new Set(py.list(value));
py.dict = (value = {}) => (isPlain(value) && !Array.isArray(value) ? { ...value } : Object.fromEntries(py.list(value)));
py.dict.fromkeys = (keys, value = null) => Object.fromEntries(py.list(keys).map((key) => [key, value]));
py.union = (left, right) => ({ ...left, ...right });
py.len = (value) => py.list(value).length;
py.map = (make, ...lists) => py.zip(...lists).map((values) => make(...values));
py.zip = (...lists) => {
  const rows = lists.map(py.list);
  return rows[0].map((_, at) => rows.map((row) => row[at]));
};
py.enumerate = (value) => py.list(value).map((item, at) => [at, item]);
py.any = (value) => py.list(value).some(py.truth);
py.all = (value) => py.list(value).every(py.truth);
py.max = (...values) => Math.max(...(values.length === 1 ? py.list(values[0]) : values).map(number));
py.min = (...values) => Math.min(...(values.length === 1 ? py.list(values[0]) : values).map(number));

py.next = (values, otherwise) => {
  if (values.length || otherwise !== undefined) return values.length ? values[0] : otherwise;
  throw new Error("there is no next value");
};
py.item = (from, key) => {
  if (!(key in from)) throw new Error(`${String(key)} is missing`);
  return from[key];
};
py.get = (from, key, otherwise = null) => (Object.hasOwn(from, key) ? from[key] : otherwise);
py.has = (container, key) => {
  if (typeof container === "string") return container.includes(key);
  if (container instanceof Set) return container.has(key);
  return Array.isArray(container) ? container.includes(key) : Object.hasOwn(container, key);
};
py.items = (from) => Object.entries(from);
py.keys = (from) => Object.keys(from);
py.values = (from) => Object.values(from);
py.append = (list, value) => { list.push(value); };
py.index = (list, value) => {
  if (!list.includes(value)) throw new Error(`${String(value)} is missing`);
  return list.indexOf(value);
};

function compareValues(a, b) {
  if (Array.isArray(a)) {
    return a.map((value, at) => compareValues(value, b[at])).find((order) => order !== 0) ?? 0;
  }
  return a < b ? -1 : Number(a > b);
}
py.sorted = (values, key = (value) => value) => {
  const pairs = py.list(values).map((value) => [key(value), value]);
  return pairs.sort((a, b) => compareValues(a[0], b[0])).map((pair) => pair[1]);
};

// Instances of dataclasses.

const kept = new WeakMap();
py.cached = (self, name, make) => {
  if (!kept.has(self)) kept.set(self, {});
  const found = kept.get(self);
  if (!Object.hasOwn(found, name)) found[name] = make();
  return found[name];
};
py.replace = (self, changes) => {
  const fields = self.constructor.fields.map((name) => (Object.hasOwn(changes, name) ? changes[name] : self[name]));
  return new self.constructor(...fields);
};

// Texts, with Python's formats.

const MORE = 40; // digits: enough to tell a half from what is near it

py.str = (value) => String(value);
py.float = (value) => (typeof value === "string" ? Number(value) : number(value));
py.repr = (value) => (typeof value === "string" ? `'${value}'` : py.str(value));
py.lower = (text) => text.toLowerCase();
py.strip = (text) => text.trim();
py.split = (text, by) => text.split(by);
py.replace_text = (text, old, by) => text.replaceAll(old, by);
py.startswith = (text, start) => text.startsWith(start);
py.endswith = (text, end) => text.endsWith(end);
py.join = (between, parts) => py.list(parts).join(between);
py.format_text = (template, ...values) =>
  template.replace(/\{(?::([^}]*))?\}/g, (_, format = "") => py.format(values.shift(), format));

// As toFixed and toExponential, but a digit whose rest is exactly half becomes even, as Python has it.
function rounded(value, digits, how) {
  const [long, exponent = ""] = value[how](digits + MORE).split(/(?=e)/);
  const isHalf = /^50*$/.test(long.slice(-MORE));
  const down = long.slice(0, -MORE).replace(/\.$/, "");
  return isHalf && Number(down.at(-1)) % 2 === 0 ? down + exponent : value[how](digits);
}

function withCommas(text) {
  const [whole] = text.split(/[.e]/);
  return whole.replace(/\B(?=(\d{3})+$)/g, ",") + text.slice(whole.length);
}

function general(value, digits) {
  if (value === 0) return "0";
  const [mantissa, power] = rounded(value, digits - 1, "toExponential").split("e");
  const exponent = Number(power);
  const bare = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  if (exponent >= -4 && exponent < digits) {
    return bare(Number(`${mantissa}e${exponent}`).toFixed(digits - 1 - exponent));
  }
  return `${bare(mantissa)}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
}

const FORMATS = {
  "": (value) => String(value),
  ",": (value) => withCommas(String(value)),
  ",.0f": (value) => withCommas(rounded(value, 0, "toFixed")),
  ".0f": (value) => rounded(value, 0, "toFixed"),
  ".2f": (value) => rounded(value, 2, "toFixed"),
  ".0%": (value) => `${rounded(100 * value, 0, "toFixed")}%`,
  g: (value) => general(value, 6),
  ".3g": (value) => general(value, 3),
  ",.10g": (value) => withCommas(general(value, 10)),
};
py.format = (value, format) => FORMATS[format](format === "" ? value : number(value));
