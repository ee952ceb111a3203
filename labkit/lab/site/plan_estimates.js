// What of a plan is not translated: numbers with their intervals, their draws, and checks of what was entered.

const KINDS_OF_DATA = TABLES.data;

function wrong(text) {
  throw new py.ValueError(text);
}

// A float as Python shows it.
const shown = (value) => (Number.isInteger(value) && Math.abs(value) < 1e16 ? `${value}.0` : String(value));

class Estimate {
  constructor(value, low = null, high = null, source = "entered", kind = "entered") {
    Object.assign(this, { value, low, high, source, kind });
    if (!this.isRight()) {
      const given = Object.entries({ low, value, high }).map(([name, each]) => `${name}=${shown(each)}`);
      wrong(`an estimate must be one number >= 0, or numbers 0 < low <= value <= high, got ${given.join(", ")}`);
    }
  }

  isRight() {
    const [least, most] = this.interval;
    const isOrdered = [least, this.value, most].every(Number.isFinite) && least <= this.value && this.value <= most;
    return isOrdered && least >= 0 && (least > 0 || most === 0);
  }

  get interval() {
    return [this.low ?? this.value, this.high ?? this.value];
  }

  times(factor, source) {
    const [low, high] = this.interval;
    return new Estimate(this.value * factor, low * factor, high * factor, source, this.kind);
  }

  draw(name) {
    return py.cached(this, name, () => this.drawn(name));
  }

  drawn(name) {
    const [low, high] = this.interval;
    if (low === this.value && high === this.value) return py.ones(TABLES.n_draws).fill(this.value);
    const [below, above] = [low, high].map((end) => Math.abs(Math.log(end / this.value)) / TABLES.quantile);
    return shuffled(name).map((each) => this.value * Math.exp(each * (each < 0 ? below : above)));
  }
}

function as_estimate(name, given) {
  if (given instanceof Estimate) return given;
  const numbers = Number.isFinite(given) ? [given] : given;
  if (!Array.isArray(numbers) || !numbers.length || numbers.length > 3 || !numbers.every(Number.isFinite)) {
    wrong(`${name} must be a number, (low, high) or (low, value, high), got ${py.repr(given)}`);
  }
  const [low, high] = [numbers[0], numbers.at(-1)];
  const value = numbers.length === 3 ? numbers[1] : numbers.length === 2 ? Math.sqrt(low * high) : low;
  try {
    return new Estimate(value, low, high);
  } catch (error) {
    return wrong(`${name}: ${error.message}`);
  }
}

function require_int(name, value, minimum = 1) {
  if (!Number.isInteger(value) || value < minimum) {
    wrong(`${name} must be an integer >= ${minimum}, got ${Array.isArray(value) ? listed(value) : value}`);
  }
  return value;
}

const listed = (numbers) => `(${numbers.join(", ")})`;

function require_positive(name, value) {
  if (!Number.isFinite(value) || value <= 0) wrong(`${name} must be a number > 0, got ${value}`);
  return value;
}

// A page has no diagnosis.
function is_seen() {
  return false;
}

function inputs_of() {
  wrong("a page has no diagnosis");
}

function _known_costs(costs) {
  return costs ?? { by_data: {}, notes: [] };
}

// What `LoaderCosts.save_json` wrote.
function loadCosts(text, path) {
  try {
    const found = JSON.parse(text);
    const unknown = Object.keys(found.costs).filter((data) => !KINDS_OF_DATA.includes(data));
    if (unknown.length) wrong(`unknown data ${unknown.join(", ")}`);
    const made = (each) => new Estimate(each.value, each.low, each.high, each.source, each.kind);
    const of = (costs) => py.dict(py.items(costs).map(([name, each]) => [name, made(each)]));
    return { by_data: py.dict(py.items(found.costs).map(([data, costs]) => [data, of(costs)])), notes: found.notes };
  } catch (error) {
    return wrong(`${path} holds no costs of labkit.loader_costs: ${error.message}`);
  }
}

function compute(lines, draws) {
  const found = { ...draws };
  for (const line of lines) {
    if (line.needs.every((name) => name in found)) found[line.name] = line.function(...line.uses.map((name) => found[name]));
  }
  return found;
}

const of_draws = (values) => {
  const [low, value, high] = py.quantile(values, [0.025, 0.5, 0.975]);
  return [value, low, high];
};

// Draws: NumPy's `default_rng(crc32(name)).permutation(deviates)`, bit for bit. Its generator is PCG64 (M. E. O'Neill,
// https://www.pcg-random.org/paper.html), which SeedSequence starts.

const [MASK_32, MASK_64, MASK_128] = [32n, 64n, 128n].map((bits) => (1n << bits) - 1n);
const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

function crc32(text) {
  let found = ~0;
  for (const byte of [...text].map((letter) => letter.charCodeAt(0))) {
    found ^= byte;
    for (let bit = 0; bit < 8; bit++) found = (found >>> 1) ^ (found & 1 ? 0xedb88320 : 0);
  }
  return ~found >>> 0;
}

// Eight words of 32 bits, as SeedSequence(seed).generate_state gives.
function seedWords(seed) {
  let constant = 0x43b0d7e5;
  const mixed = (value) => {
    value ^= constant;
    constant = Math.imul(constant, 0x931e8875);
    value = Math.imul(value, constant);
    return value ^ (value >>> 16);
  };
  const pool = [seed, 0, 0, 0].map(mixed);
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) {
      if (from === to) continue;
      const both = Math.imul(0xca01f9dd, pool[to]) - Math.imul(0x4973f715, mixed(pool[from]));
      pool[to] = both ^ (both >>> 16);
    }
  }
  constant = 0x8b51f9dd;
  return [...pool, ...pool].map((value) => {
    value ^= constant;
    constant = Math.imul(constant, 0x58f38ded);
    value = Math.imul(value, constant);
    return (value ^ (value >>> 16)) >>> 0;
  });
}

// A function that gives words of 32 bits.
function pcg64(seed) {
  const words = seedWords(seed).map(BigInt);
  const [start, , step] = [0, 2, 4].map((at) =>
    (((words[at + 1] << 32n) | words[at]) << 64n) | (words[at + 3] << 32n) | words[at + 2]);
  const increment = ((step << 1n) | 1n) & MASK_128;
  let state = 0n;
  const advance = () => { state = (state * MULTIPLIER + increment) & MASK_128; };
  advance();
  state += start;
  advance();
  let half = null;
  return () => {
    if (half !== null) {
      const word = half;
      half = null;
      return word;
    }
    advance();
    const [folded, turn] = [(state >> 64n) ^ (state & MASK_64), state >> 122n];
    const bits = ((folded >> turn) | (folded << (64n - turn))) & MASK_64;
    half = Number(bits >> 32n);
    return Number(bits & MASK_32);
  };
}

// A whole number from 0 to `most`: of as many bits as that has, drawn until one is small enough.
function drawUpTo(next, most) {
  const shift = Math.clz32(most);
  for (;;) {
    const found = (next() << shift) >>> shift;
    if (found <= most) return found;
  }
}

const orders = new Map();

// The deviates in the order that belongs to a name.
function shuffled(name) {
  if (!orders.has(name)) {
    const [found, next] = [Float64Array.from(deviates()), pcg64(crc32(name))];
    for (let at = found.length - 1; at > 0; at--) {
      const other = drawUpTo(next, at);
      [found[at], found[other]] = [found[other], found[at]];
    }
    orders.set(name, found);
  }
  return orders.get(name);
}

function deviates() {
  const above = TABLES.deviates;
  return [...above.slice(1).reverse().map((each) => -each), ...above];
}

// A plan as plain data: what `Plan.to_dict` gives, and each cure as a text.

function planned(given) {
  const { inputs = {}, ...others } = given;
  const made = plan(...TABLES.parameters.map((name) => others[name]), inputs);
  const setup = made.setup;
  const lines = rows(made);
  if (!lines.every((line) => [line.value, line.low, line.high].every(Number.isFinite))) {
    wrong("these numbers are too large or too small to compute with");
  }
  const cures = made.cures.map((cure) => {
    const { action, effort, gain, images_per_s, then, is_known } = cure;
    return { action, effort, gain, images_per_s, then: RESOURCES[then], is_known, text: String(cure) };
  });
  const scarcest = py.dict(py.items(setup.scarcities).map(([name, share]) => [RESOURCES[name], share]));
  return {
    title: made.title, storage: setup.storage, data: setup.data, bottleneck: made.bottleneck, scarcest,
    sentences: made.sentences, notes: made.notes, cures, lines,
  };
}

function rows(made) {
  const [setup, sources] = [made.setup, made._sources()];
  const inputs = py.items(setup.inputs).filter(([name]) => name in INPUTS && made._is_used(name));
  return [
    ...inputs.map(([name, each]) => ({
      group: "input", name, quantity: INPUTS[name].label, value: each.value, low: each.interval[0],
      high: each.interval[1], unit: INPUTS[name].unit, formula: "", sources: sources[name], status: each.kind,
    })),
    ...setup.lines.map((line) => {
      const [value, low, high] = of_draws(setup.draws[line.name]);
      const { group, name, label, unit, formula } = line;
      return { group, name, quantity: label, value, low, high, unit, formula, sources: sources[name], status: "predicted" };
    }),
  ];
}
