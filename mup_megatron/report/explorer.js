// The page of `mup-megatron explain --html`: sizes are moved, every number of the table follows.
//
// `DATA` is explorer.py's. `valuesAt` is rules/laws.py's `TensorLaws.at`; a test holds that both agree.

const product = (law, ratios) =>
  Object.entries(law.powers).reduce((value, [name, power]) => value * ratios[name] ** power, law.constant);

const ratioOf = (side, ratios) => (side.base ? product(side.size, ratios) / side.base : 1);

// The sizes' ratios, and those of a matrix of these rows: of fan-in, of fan-out and of the larger of both.
function ratiosOf(tensor, rows, ratios) {
  const sides = [rows, tensor.fan_in], sizes = sides.map((side) => product(side.size, ratios));
  const base = Math.max(...sides.map((side, n) => side.base ?? sizes[n]));
  const larger = Math.max(...sizes) / base;
  return {...ratios, m_in: ratioOf(tensor.fan_in, ratios), m_out: ratioOf(rows, ratios), larger};
}

const mapped = (object, of) =>
  Object.fromEntries(Object.entries(object).map(([name, value]) => [name, of(value, name)]));

// What a tensor gets where every size has its ratio to the target's.
function valuesAt(tensor, ratios) {
  const blocks = mapped(tensor.fan_outs, (side) => ratiosOf(tensor, side, ratios));
  const outs = mapped(blocks, (own) => own.m_out), m_out = Math.max(...Object.values(outs));
  const whole = {...ratiosOf(tensor, tensor.rows, ratios), m_out};
  const rates = Object.values(blocks).map((own) => product(tensor.values.lr, own));
  const refused = tensor.one_rate && rates.some((rate) => Math.abs(rate / rates[0] - 1) > 1e-9);
  const init = mapped(tensor.init, (law, block) => product(law, blocks[block]));
  return {...mapped(tensor.values, (law) => product(law, whole)), init, outs, m_in: whole.m_in, refused};
}

// The power of every size in one number of a tensor, through the tensor's own ratios.
function powersOf(tensor, law, ratios, block) {
  const found = {}, add = (powers, times) => {
    for (const [name, power] of Object.entries(powers)) found[name] = (found[name] ?? 0) + times * power;
  };
  const largest = block ?? Object.keys(tensor.fan_outs).reduce(
    (one, other) => (ratioOf(tensor.fan_outs[other], ratios) > ratioOf(tensor.fan_outs[one], ratios) ? other : one));
  const larger = product(tensor.rows.size, ratios) >= product(tensor.fan_in.size, ratios) ? tensor.rows : tensor.fan_in;
  const sides = {m_in: tensor.fan_in, m_out: tensor.fan_outs[largest], larger};
  for (const [name, power] of Object.entries(law.powers)) {
    if (!(name in sides)) add({[name]: 1}, power);
    else if (sides[name].base) add(sides[name].size.powers, power);
  }
  return Object.fromEntries(Object.entries(found).filter(([, power]) => Math.abs(power) > 1e-9));
}

const QUANTITIES = {init: "init std", lr: "rate", eps: "epsilon", weight_decay: "decay", forward: "multiplier"};
const SIGNS = {init: "σ", lr: "η", eps: "ε", weight_decay: "λ", forward: "α"};
const sizes = Object.keys(DATA.sizes);
const shortName = (size) => size.split(".")[1];
const whole = (value) => String(Math.round(value * 100) / 100);
const number = (value) => {
  const short = Number(value.toPrecision(4));
  return short !== 0 && Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
};
const times = (factor) => `×${number(factor)}`;
const atTarget = mapped(DATA.sizes, () => 1);
const atBase = mapped(DATA.sizes, ({target, base}) => (base ?? target) / target);
let ratios = {...atTarget}, beside = Object.keys(DATA.laws)[1] ?? "", chosen = null;

const element = (tag, text, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

// Blue below the base's value, orange above it; the stronger, the farther.
function colour(factor) {
  if (!(factor > 0) || factor === 1) return "";
  const strength = Math.min(Math.abs(Math.log2(factor)) / 8, 1) * 0.55 + 0.08;
  return factor < 1 ? `rgba(50, 110, 190, ${strength})` : `rgba(220, 120, 30, ${strength})`;
}

// The numbers of one cell: one, or one of each block where they differ.
function cells(tensor, quantity, values) {
  if (quantity !== "init") return quantity in values ? [["", values[quantity]]] : [];
  const found = Object.entries(values.init);
  return found.every(([, std]) => std === found[0][1]) ? [["", found[0][1]]] : found;
}

function cell(index, quantity) {
  const tensor = DATA.laws[DATA.own].tensors[index], here = valuesAt(tensor, ratios), base = valuesAt(tensor, atBase);
  const shown = cells(tensor, quantity, here), made = element("td", null, {tabindex: 0});
  made.dataset.index = index;
  made.dataset.quantity = quantity;
  if (quantity === "lr" && here.refused) {
    made.append(element("span", "refused: its blocks would need rates of their own"));
    return made;
  }
  const other = beside && valuesAt(DATA.laws[beside].tensors[index], ratios);
  for (const [block, value] of shown) {
    const before = quantity === "init" ? base.init[block || Object.keys(base.init)[0]] : base[quantity];
    const line = element("div", null, {style: `background: ${colour(value / before)}`});
    const text = quantity === "init" && value === 0 ? "constant" : number(value);
    line.append(element("span", block ? `${block} ${text}` : text));
    if (value && before && value !== before) line.append(element("small", ` ${times(value / before)}`));
    if (other) {
      const theirs = quantity === "init" ? other.init[block || Object.keys(other.init)[0]] : other[quantity];
      const differs = theirs !== undefined && Math.abs(theirs - value) > 1e-9 * Math.abs(value);
      if (differs) line.append(element("div", number(theirs), {class: "other"}));
    }
    made.append(line);
  }
  made.title = rule(tensor, quantity);
  return made;
}

// The rule of one number: what the code's own table of formulas says, and what it comes to here.
function rule(tensor, quantity) {
  const said = DATA.rules[quantity][tensor.update_rule] ?? DATA.rules[quantity][""];
  return said ? `${SIGNS[quantity]} · ${said.multiplier}   (${said.source}; formulas.${said.function})` : "";
}

function powersInWords(tensor, quantity) {
  const laws = quantity === "init" ? Object.entries(tensor.init) : [[undefined, tensor.values[quantity]]];
  const words = laws.map(([block, law]) => {
    const powers = Object.entries(powersOf(tensor, law, ratios, block));
    const written = powers.map(([size, power]) => `${shortName(size)}^${number(power)}`).join(" · ") || "no size";
    return `${block ? `${block}: ` : ""}${written}`;
  });
  return [...new Set(words)].join("; ");
}

function drawChosen() {
  const place = document.getElementById("chosen");
  place.replaceChildren();
  if (!chosen) {
    place.append(element("p", "Choose a number: its rule, its powers and the other parametrizations appear here."));
    return;
  }
  const [index, quantity] = chosen, tensor = DATA.laws[DATA.own].tensors[index], here = valuesAt(tensor, ratios);
  place.append(element("h3", `${tensor.name}: ${QUANTITIES[quantity]}`));
  const outs = Object.entries(here.outs).map(([name, ratio]) => `${name ? `${name} ` : ""}${number(ratio)}`).join(", ");
  place.append(element("p", `${rule(tensor, quantity)}. Here m_in = ${number(here.m_in)}, m_out = ${outs}.`));
  const table = element("table", null);
  for (const [name, laws] of Object.entries(DATA.laws)) {
    const other = laws.tensors[index], row = element("tr", null);
    if (!(quantity in other.values) && quantity !== "init") continue;
    const values = cells(other, quantity, valuesAt(other, ratios));
    const shown = values.map(([block, value]) => `${block ? `${block} ` : ""}${number(value)}`).join(", ");
    const powers = `goes as ${powersInWords(other, quantity)}`;
    row.append(element("td", DATA.names[name]), element("td", shown), element("td", powers));
    table.append(row);
  }
  place.append(table);
}

function drawTable() {
  const body = document.getElementById("tensors");
  body.replaceChildren();
  DATA.laws[DATA.own].tensors.forEach((tensor, index) => {
    const here = valuesAt(tensor, ratios), row = element("tr", null);
    const size = (side) => whole(product(side.size, ratios));
    const outs = Object.entries(tensor.fan_outs);
    const rows = outs.map(([, side]) => size(side)).join(" + ");
    const shape = tensor.kind === "vector" ? rows : `${rows} × ${size(tensor.fan_in)}`;
    row.append(element("td", tensor.name), element("td", shape));
    row.append(element("td", tensor.fan_in.base ? times(here.m_in) : "fixed"));
    const ratiosOut = [...new Set(outs.map(([name, side]) => (side.base ? times(here.outs[name]) : "fixed")))];
    row.append(element("td", ratiosOut.join(", ")));
    for (const quantity of Object.keys(QUANTITIES)) row.append(cell(index, quantity));
    body.append(row);
  });
  const forward = document.getElementById("forward");
  forward.replaceChildren();
  for (const [name, words] of Object.entries(DATA.forward)) {
    const own = product(DATA.laws[DATA.own].forward[name], ratios), line = element("li", `${words} × ${number(own)}`);
    const theirs = beside ? product(DATA.laws[beside].forward[name], ratios) : own;
    if (Math.abs(theirs / own - 1) > 1e-9) line.append(" ", element("span", number(theirs), {class: "other"}));
    forward.append(line);
  }
  drawChosen();
}

function set(size, value) {
  if (!(value >= 1)) return;
  ratios[size] = value / DATA.sizes[size].target;
  draw();
}

function draw() {
  for (const size of sizes) {
    const value = Math.round(ratios[size] * DATA.sizes[size].target * 1e6) / 1e6;
    document.getElementById(`${size} slider`).value = Math.log2(value);
    document.getElementById(`${size} number`).value = value;
    const {target, base} = DATA.sizes[size];
    const told = base ? `${times(value / base)} of the base's ${base}` : `target ${target}`;
    document.getElementById(`${size} ratio`).textContent = told;
  }
  drawTable();
}

function controls() {
  const place = document.getElementById("sizes");
  for (const size of sizes) {
    const {target, base, along} = DATA.sizes[size], middle = Math.log2(target);
    const low = Math.max(Math.log2(Math.min(base ?? target, target)) - 1, 0);
    const label = [size, ...along].map(shortName).join(", ");
    const box = element("label", null), slider = element("input", null, {
      type: "range", id: `${size} slider`, min: low, max: middle + 4, step: 0.5, "aria-label": label,
    });
    const exact = element("input", null, {type: "number", id: `${size} number`, min: 1, "aria-label": label});
    slider.addEventListener("input", () => set(size, Math.round(2 ** slider.value)));
    exact.addEventListener("change", () => set(size, Number(exact.value)));
    box.append(element("span", label), slider, exact, element("small", "", {id: `${size} ratio`}));
    place.append(box);
  }
  for (const [name, to] of [["base", atBase], ["target", atTarget]])
    document.getElementById(`to ${name}`).addEventListener("click", () => { ratios = {...to}; draw(); });
  const choice = document.getElementById("beside");
  for (const name of Object.keys(DATA.laws).slice(1)) choice.append(element("option", DATA.names[name], {value: name}));
  choice.append(element("option", "nothing", {value: ""}));
  choice.addEventListener("change", () => { beside = choice.value; draw(); });
  const choose = (event) => {
    const cell = event.target.closest("td[data-quantity]");
    if (!cell || (event.type === "keydown" && event.key !== "Enter")) return;
    chosen = [Number(cell.dataset.index), cell.dataset.quantity];
    drawChosen();
  };
  for (const event of ["click", "keydown"]) document.getElementById("tensors").addEventListener(event, choose);
}

controls();
draw();
