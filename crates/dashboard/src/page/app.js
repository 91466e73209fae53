// The dashboard's page: polls the API once a second and shows the answers.
//
// Whatever comes from the API (names of ranks, hosts, keys) was written by untrusted clients and is inserted
// as text,
// never as markup. Rows are kept and changed in place, so that focus, selection and scroll position stay.
// Long tables
// are cut to a number of rows that a browser draws quickly; a button shows more.
"use strict";

const FAST = 1000; // ms between two requests for what changes often
const SLOW = 4000; // ms between two requests for keys, slow operations and clients
const PATIENCE = 8000; // ms that one answer may take
const ROWS = 100; // of a table before "show more"
const RANK_ROWS = 64; // ranks as rows of a table; more of them become cells
const CELLS = 2048;
const PROBLEMS = 20; // ranks named individually above the cells

const $ = (id) => document.getElementById(id);
const list = (value) => (Array.isArray(value) ? value : []);
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

// ---- Making and changing the document ------------------------------------------------------------------------------

function make(tag, classes, ...content) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  node.append(...content.filter((item) => item !== null));
  return node;
}

/** Sets text only if it changed: an untouched node keeps its selection and costs no layout. */
function write(node, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

function classes(node, wanted) {
  if (node.getAttribute("class") !== wanted) node.setAttribute("class", wanted);
}

function attribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function show(node, wanted) {
  if (node.hasAttribute("hidden") === wanted) node.toggleAttribute("hidden", !wanted); // also for SVG
}

/** Makes the children of `parent` those of `items`, by key: kept if known, made if new, moved only if needed. */
function sync(parent, items, keyOf, create, update) {
  const known = parent.known ?? (parent.known = new Map());
  const seen = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (seen.has(key)) continue;
    seen.add(key);
    let node = known.get(key);
    if (!node) known.set(key, (node = create(item)));
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
    update(node, item);
  }
  for (const [key, node] of known) {
    if (!seen.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
}

/** A row whose cells have these classes; `fill` writes their texts. */
function row(...cells) {
  return make("tr", "", ...cells.map((name) => make("td", name)));
}

function fill(tr, ...texts) {
  texts.forEach((text, index) => write(tr.cells[index], text));
}

/** A table of rows cut to what is drawn quickly; shows how many there are, with a button for more. */
const shown = new Map();
const FIRST = { slow: 10, waiting: 20 }; // tables above other parts are kept short
function table(name, items, keyOf, columns, update) {
  const limit = shown.get(name) ?? FIRST[name] ?? ROWS;
  show($(`${name}-table`), items.length > 0);
  show($(`${name}-none`), items.length === 0);
  sync($(`${name}-table`).tBodies[0], items.slice(0, limit), keyOf, () => row(...columns), update);
  more(name, items.length - limit, limit);
}

function more(name, rest, limit) {
  const button = $(`${name}-more`);
  if (!button) return;
  show(button, rest > 0);
  write(button, `show ${count(Math.min(rest, limit * 4))} more of ${count(rest)}`);
}

// ---- Readable numbers ----------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const count = (value) => (number(value) === null ? "–" : whole.format(value));

function short(value) {
  if (value < 10000) return value < 10 && value % 1 ? value.toFixed(1) : whole.format(value);
  for (const unit of ["k", "M", "G"]) {
    value /= 1000;
    if (value < 1000 || unit === "G") return `${trim(value)} ${unit}`;
  }
}

/** 20, 2.5, 310: no more digits than are useful. */
const trim = (value) => value.toFixed(value < 100 && value % 1 ? 1 : 0);

function bytes(value) {
  if (number(value) === null) return "–";
  if (value < 1024) return `${whole.format(value)} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    value /= 1024;
    if (value < 1024 || unit === "TiB") return `${value.toFixed(value < 100 ? 1 : 0)} ${unit}`;
  }
}

function seconds(value) {
  if (number(value) === null) return "–";
  const full = Math.floor(Math.max(0, value));
  if (full < 10) return `${Math.max(0, value).toFixed(1)} s`;
  if (full < 120) return `${full} s`;
  if (full < 7200) return `${Math.floor(full / 60)} min ${full % 60} s`;
  if (full < 172800) return `${Math.floor(full / 3600)} h ${Math.floor(full / 60) % 60} min`;
  return `${Math.floor(full / 86400)} d ${Math.floor(full / 3600) % 24} h`;
}

/** Whole seconds, for ages that have no fractions. */
const age = (value) => (number(value) === null ? "–" : value < 1 ? "now" : seconds(value).replace(/\.0 s$/, " s"));

function microseconds(value) {
  if (number(value) === null) return "–";
  if (value < 1000) return `${Math.round(value)} µs`;
  return value < 1e6 ? `${(value / 1000).toFixed(1)} ms` : `${(value / 1e6).toFixed(2)} s`;
}

const plural = (amount, noun) => `${count(amount)} ${noun}${amount === 1 ? "" : "s"}`;

/** [0, 1, 2, 3, 5] → "0–3, 5". */
function ranges(numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts = [];
  for (let from = 0; from < sorted.length; ) {
    let to = from;
    while (sorted[to + 1] === sorted[to] + 1) to++;
    parts.push(to - from > 1 ? `${sorted[from]}–${sorted[to]}` : sorted.slice(from, to + 1).join(", "));
    from = to + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")} …` : parts.join(", ");
}

// ---- Charts --------------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, STEPS] = [300, 100, 300];
const charts = [];
let pointedAt = null; // the pointer's position on any chart, in steps ago

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** The next round number (of KiB, MiB … for bytes): the top of an axis that does not jump every second. */
function axisTop(value, isBytes) {
  const unit = isBytes ? 1024 ** Math.max(1, Math.floor(Math.log2(Math.max(value, 1)) / 10)) : 1;
  const wanted = Math.max(value / unit, isBytes ? 1 : 10);
  const power = 10 ** Math.floor(Math.log10(wanted));
  return unit * power * ([1, 1.5, 2, 3, 4, 5, 6, 8].find((step) => step * power >= wanted) ?? 10);
}

class Chart {
  constructor(id, title, format, options = {}) {
    Object.assign(this, { id, title, format, ...options });
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.paths = svg("g", {});
    this.grid = [0, 0.5].map((y) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y * HEIGHT, y2: y * HEIGHT }));
    this.limitLine = svg("line", { class: "limit", x1: 0, x2: WIDTH, visibility: "hidden" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const floor = svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT });
    this.svg.append(...this.grid, floor, this.paths, this.limitLine, this.cursor);
    this.when = make("span", "when");
    this.top = make("span", "top");
    this.now = make("p", "now");
    this.keyed = make("ul", "keyed");
    const heading = make("h3", "", make("span", "", title), this.when);
    const axis = make("div", "axis", make("span", "", "5 min ago"), make("span", "", "now"));
    const plot = make("div", "plot", this.svg, this.top);
    this.figure = make("figure", "chart", heading, this.now, plot, axis, this.keyed);
    this.figure.id = `chart-${id}`;
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      pointAt(Math.round((1 - x) * (STEPS - 1)));
    });
    this.svg.addEventListener("pointerleave", () => pointAt(null));
    charts.push(this);
    $("charts").append(this.figure);
  }

  /** series: [{name, values, slot}], oldest first; limit: a line for the upper limit. */
  draw(series, { step = 1, limit = null } = {}) {
    Object.assign(this, { series, step, limit });
    const length = Math.max(0, ...series.map((one) => one.values.length));
    const tops = [];
    const base = new Array(length).fill(0);
    const drawn = series.map((one) => {
      const padded = new Array(length - one.values.length).fill(0).concat(one.values.map((value) => number(value) ?? 0));
      const low = this.stacked ? base.slice() : null;
      const high = padded.map((value, index) => (this.stacked ? (base[index] += value) : value));
      tops.push(...high.slice(-STEPS));
      return { low, high, slot: one.slot };
    });
    const most = tops.reduce((a, b) => Math.max(a, b), 0);
    const near = limit !== null && most > limit / 2;
    const top = axisTop(near ? Math.max(most, limit) : most, this.isBytes);
    this.most = most;
    attribute(this.limitLine, "visibility", near ? "visible" : "hidden");
    if (near) ["y1", "y2"].forEach((name) => attribute(this.limitLine, name, HEIGHT * (1 - limit / top)));
    write(this.top, this.format(top));
    this.drawPaths(drawn, length, top);
    this.label();
  }

  drawPaths(drawn, length, top) {
    const x = (index) => (WIDTH - ((length - 1 - index) * WIDTH) / (STEPS - 1)).toFixed(1);
    const y = (value) => (HEIGHT * (1 - value / top)).toFixed(1);
    const from = Math.max(0, length - STEPS);
    const trace = (values, backwards) => {
      const points = [];
      for (let index = from; index < length; index++) points.push(`${x(index)} ${y(values[index])}`);
      return (backwards ? points.reverse() : points).join("L");
    };
    const paths = [];
    for (const { low, high, slot } of drawn) {
      if (length - from < 2) break;
      const line = trace(high);
      const area = `M${line}L${low ? trace(low, true) : `${WIDTH} ${HEIGHT}L${x(from)} ${HEIGHT}`}Z`;
      paths.push({ classes: `${this.stacked ? "area" : "under"} s${slot}`, d: area });
      if (!this.stacked) paths.push({ classes: `line s${slot}`, d: `M${line}` });
    }
    while (this.paths.childElementCount > paths.length) this.paths.lastChild.remove();
    while (this.paths.childElementCount < paths.length) this.paths.append(svg("path", {}));
    paths.forEach((path, index) => {
      classes(this.paths.children[index], path.classes);
      attribute(this.paths.children[index], "d", path.d);
    });
  }

  /** The figures as text: the current ones, or those at the pointer. */
  label() {
    if (!this.series) return;
    const back = pointedAt ?? 0;
    const at = (values) => number(values[values.length - 1 - back]);
    const text = (value) => (value === null ? "–" : this.format(value));
    const values = this.series.map((one) => at(one.values));
    const head = this.stacked ? values.reduce((sum, value) => sum + (value ?? 0), 0) : values[0];
    write(this.now, this.stacked || values.length === 1 ? text(head) : values.map(text).join("  /  "));
    write(this.when, back ? `${seconds(back * this.step).replace(".0 ", " ")} ago` : "");
    attribute(this.cursor, "visibility", back ? "visible" : "hidden");
    ["x1", "x2"].forEach((name) => attribute(this.cursor, name, WIDTH - (back * WIDTH) / (STEPS - 1)));
    const names = this.series.map((one, index) => ({ ...one, text: `${one.name} ${text(values[index])}` }));
    const labels = names.length > 1 ? names.filter((one, index) => !this.stacked || one.values.some(Boolean)) : [];
    if (this.limit !== null) labels.push({ name: "limit", slot: null, text: `limit ${this.format(this.limit)}` });
    sync(this.keyed, labels, (one) => one.name, () => make("li", "", make("span", "swatch"), make("span", "")),
      (item, one) => {
        show(item.firstChild, one.slot !== null);
        classes(item.firstChild, `swatch s${one.slot}`);
        write(item.lastChild, one.text);
      });
    const said = names.map((one) => one.text).join(", ");
    attribute(this.svg, "aria-label", `${this.title}: ${said}; at most ${text(this.most)} in the last 5 minutes`);
  }
}

function pointAt(steps) {
  if (steps === pointedAt) return;
  pointedAt = steps;
  for (const chart of charts) chart.label();
}

/** The operations that get their own colour: the five most frequent, each keeping its colour while it is one of them. */
const slots = new Map();
function colours(totals) {
  const first = Object.keys(totals).sort((a, b) => totals[b] - totals[a]).slice(0, 5);
  for (const name of slots.keys()) if (!first.includes(name)) slots.delete(name);
  for (const name of first) {
    if (!slots.has(name)) slots.set(name, [0, 1, 2, 3, 4].find((slot) => ![...slots.values()].includes(slot)));
  }
  return [...slots].sort((a, b) => a[1] - b[1]);
}

function showHistory(history, server) {
  const step = number(history.step_seconds) ?? 1;
  const values = (name) => list(history[name]);
  const per = (name) => values(name).map((value) => value / step);
  const byOperation = history.by_operation ?? {};
  const totals = Object.fromEntries(
    Object.entries(byOperation).map(([name, each]) => [name, list(each).reduce((sum, value) => sum + value, 0)]),
  );
  const named = colours(totals);
  const series = named.map(([name, slot]) => ({ name, slot, values: list(byOperation[name]).map((value) => value / step) }));
  const rest = per("operations").map((value, index, all) =>
    Math.max(0, series.reduce((left, one) => left - (one.values[one.values.length - all.length + index] ?? 0), value))).map(Math.round);
  if (rest.some(Boolean)) series.push({ name: "other", slot: 5, values: rest });
  view.operations.draw(series, { step });
  view.traffic.draw([{ name: "in", slot: 0, values: per("bytes_in") }, { name: "out", slot: 2, values: per("bytes_out") }], { step });
  view.connections.draw(
    [{ name: "connected", slot: 1, values: values("connections") }, { name: "waiting", slot: 2, values: values("waiters") }],
    { step, limit: number(server?.connections_max) });
  view.memory.draw([{ name: "memory", slot: 3, values: values("memory_bytes") }], { step, limit: number(server?.memory_max) });
  write($("load-span"), `the last ${seconds(Math.max(1, values("operations").length) * step).replace(/\.0 s| 0 s/, (end) => (end[0] === "." ? " s" : ""))}`);
  showOperations(server?.operations ?? {}, byOperation, step);
}

// ---- Verdict -------------------------------------------------------------------------------------------------------

const SIGNS = { ok: "✓", waiting: "◔", bad: "✕" };

function showVerdicts(runs, waiters, server) {
  const lines = runs.map((run) => ({
    key: `run ${run.id}`,
    level: run.verdict_level in SIGNS ? run.verdict_level : "ok",
    text: run.verdict ?? `job ${run.id}: ${run.state?.phase ?? "?"}`,
    over: Boolean(run.state?.outcome),
  }));
  lines.sort((a, b) => a.over - b.over);
  if (!lines.length && server) lines.push(storeVerdict(waiters, server));
  sync($("verdicts"), lines.slice(0, 20), (line) => line.key,
    () => make("p", "", make("span", "sign"), make("span", "")),
    (node, line) => {
      classes(node, `verdict ${line.level}${line.over && lines.length > 1 ? " small" : ""}`);
      attribute(node.firstChild, "aria-hidden", "true");
      write(node.firstChild, SIGNS[line.level]);
      write(node.lastChild, line.text);
    });
  if (!lines.length) return;
  const worst = lines.find((line) => line.level === "bad") ?? lines[0];
  const title = `${SIGNS[worst.level]} tenfold ${location.host}`;
  if (document.title !== title) document.title = title;
  // For a screen reader: once when it changes, not with every second of a wait.
  const steady = worst.text.replace(/\d+(\.\d+)? (s|min|h|d)\b/g, "").trim();
  if (view.said !== steady) {
    view.said = steady;
    write($("say"), worst.text);
  }
}

function storeVerdict(waiters, server) {
  const longest = waiters[0];
  const clients = plural(server.connections ?? 0, "client");
  if (longest && longest.seconds >= 10) {
    const amount = server.waiters_count ?? waiters.length;
    const text = `${plural(amount, "client")} ${amount === 1 ? "has" : "have"} waited, the longest for ${seconds(longest.seconds)}: ${longest.keys}`;
    return { key: "store", level: "waiting", text };
  }
  return { key: "store", level: "ok", text: `store: ${clients}, ${plural(server.keys ?? 0, "key")}, no long waits` };
}

// ---- Nodes and ranks -----------------------------------------------------------------------------------------------

/** class, sign, word; the problems are those whose class is in PROBLEM. */
const STATES = {
  running: ["●", "running"],
  waits: ["◔", "waiting"],
  stuck: ["◕", "stuck"],
  stopped: ["‖", "stopped"],
  absent: ["○", "not joined"],
  failed: ["✕", "failed"],
  lost: ["?", "node lost"],
  done: ["✓", "ended"],
};
const PROBLEM = new Set(["stuck", "stopped", "absent", "failed", "lost"]);
const NODE_STATES = {
  joined: ["running", "●", "joined"],
  waiting: ["waits", "◔", "waiting"],
  lost: ["lost", "✕", "no heartbeat"],
  missing: ["absent", "○", "has not joined"],
  spare: ["done", "+", "spare"],
};

function stateOf(rank, node, run) {
  if (rank.state === "ended") {
    const good = ["", "exit code 0", "success", "ended well"].includes(rank.end ?? "");
    return good ? "done" : "failed";
  }
  if (run.state?.outcome) return "done";
  if (node.status === "lost") return "lost";
  if (rank.state === "stopped") return "stopped";
  if (!rank.joined) return "absent";
  if (rank.stuck) return "stuck";
  return rank.store_operation || waitsIn(rank) ? "waits" : "running";
}

/** The collective in which it has been for a while. */
function waitsIn(rank) {
  const first = list(rank.collectives)[0];
  return first?.under_way && first.seconds > 2 ? first : null;
}

/** How late a rank is in the collectives of a group, if that is worth showing. */
function lateness(collective) {
  const late = number(collective.late_seconds);
  return late === null || late < 0.001 ? "" : `; recently ${(late * 1000).toFixed(0)} ms late`;
}

function nameOf(collective) {
  return `${String(collective.call).split("(")[0]} #${collective.number}`;
}

/** The last request of a rank to the store. Nothing else is known of one that hangs in its own code. */
function lastAsked(rank) {
  const last = rank.store_last;
  return last ? `after ${last.operation} in the store, ${seconds(last.seconds)} ago` : "";
}

function doing(rank, state) {
  if (state === "failed" || state === "done") return rank.end ?? "";
  const operation = rank.store_operation;
  if (operation) return `${operation.operation} ${operation.keys}`;
  if (rank.why) return rank.why;
  const collective = list(rank.collectives)[0];
  if (collective) return `${collective.under_way ? "in" : "after"} ${nameOf(collective)} of ${collective.group}${lateness(collective)}`;
  if (state === "absent") return "has not connected to the store";
  return lastAsked(rank);
}

/** CPU per wall second over the last beats of its node: the time of a beat is known to a second only, so two beats are not enough. */
const samples = new Map();
function cpu(run, rank, node) {
  const key = `${run.id} ${rank.rank} ${rank.pid}`;
  if (number(rank.cpu_seconds) === null) return null;
  const at = Date.now() / 1000 - (number(node.beat_seconds) ?? 0);
  const known = samples.get(key) ?? [];
  if (!known.length) {
    if (samples.size > 20000) samples.clear();
    samples.set(key, known);
  }
  if (!known.length || at - known.at(-1).at > 0.7) known.push({ at, used: rank.cpu_seconds });
  while (known.length > 2 && known[1].at < at - 12) known.shift();
  const [first, last] = [known[0], known.at(-1)];
  return last.at - first.at < 2 ? null : Math.max(0, (last.used - first.used) / (last.at - first.at));
}

function readRanks(run) {
  const nodes = list(run.nodes).slice().sort((a, b) => (a.rank ?? 1e9) - (b.rank ?? 1e9));
  return nodes.map((node, place) => ({
    node,
    key: `${node.rank ?? ""} ${node.node?.id ?? place}`,
    ranks: list(node.ranks).slice().sort((a, b) => a.rank - b.rank).map((rank) => {
      const state = stateOf(rank, node, run);
      const beat = number(node.beat_seconds) ?? 0;
      const output = number(rank.last_output_seconds);
      return {
        rank, node, state,
        key: `rank ${rank.rank} ${rank.local_rank}`,
        doing: doing(rank, state),
        since: number(rank.store_operation?.seconds) ?? number(list(rank.collectives)[0]?.seconds),
        output: output === null ? null : output + beat,
        cpu: cpu(run, rank, node),
      };
    }),
  }));
}

function showRuns(runs) {
  // Running jobs come first; of finished ones only the last few are of interest.
  const ordered = runs.slice().sort((a, b) => Boolean(a.state?.outcome) - Boolean(b.state?.outcome)).slice(0, 8);
  sync($("runs"), ordered, (run) => String(run.id), makeRun, showRun);
}

function makeRun(run) {
  const part = make("section", "run");
  part.open = new Set(); // ranks whose details are shown
  part.cellsMax = CELLS;
  part.heading = make("h2", "", "Ranks of job ", make("span", "mono", String(run.id)));
  part.heading.id = `run-${Math.random().toString(36).slice(2)}`;
  part.setAttribute("aria-labelledby", part.heading.id);
  part.facts = make("p", "facts");
  part.generations = make("ul", "generations");
  part.generations.setAttribute("aria-label", "Generations");
  part.failure = make("pre", "failure");
  part.legend = make("ul", "legend");
  part.detail = make("dl", "detail");
  const head = make("tr", "");
  for (const [name, kind] of RANK_COLUMNS) {
    const cell = make("th", kind, name);
    cell.scope = "col";
    head.append(cell);
  }
  part.table = make("table", "ranks", make("thead", "", head), make("tbody", ""));
  part.cells = make("div", "");
  part.rest = make("p", "note");
  part.append(part.heading, part.facts, part.generations, part.failure, part.legend, part.table, part.rest, part.detail, part.cells);
  return part;
}

const RANK_COLUMNS = [
  ["rank", "who"], ["state", "short"], ["doing", "key"], ["for", "number"], ["output", "number wide"],
  ["CPU", "number wide"], ["memory", "number wide"], ["pid", "number wide"],
];

function showRun(part, run) {
  const nodes = readRanks(run);
  const ranks = nodes.flatMap((one) => one.ranks);
  const state = run.state ?? {};
  const facts = [
    ["phase", state.outcome ? `over: ${state.outcome}` : state.phase],
    ["round", state.round],
    ["restarts", `${state.restarts_used ?? 0} of ${state.max_restarts ?? 0}`],
    ["nodes", `${nodes.filter((one) => one.node.status === "joined").length} (${state.nodes_min ?? "?"} to ${state.nodes_max ?? "?"})`],
    ["ranks", ranks.length],
  ];
  const spares = nodes.reduce((sum, one) => sum + list(one.node.spares).length, 0);
  if (spares) facts.push(["spares", spares]);
  const generations = list(run.generations);
  const last = generations.at(-1);
  if (last && last.round === state.round) facts.push(["generation", last.generation]);
  showGenerations(part.generations, generations);
  // The server lists the longest waits only: a rank with a shorter wait looks as if it ran.
  const waits = number(view.overview?.server?.waiters_count) ?? 0;
  if (waits > view.waiters.length) facts.push(["known waits", `${count(view.waiters.length)} of ${count(waits)}`]);
  sync(part.facts, facts, ([name]) => name, ([name]) => make("span", "", `${name} `, make("b", "")),
    (node, [, value]) => write(node.lastChild, value));
  const failure = state.failure;
  show(part.failure, Boolean(failure));
  if (failure) {
    const where = `rank ${failure.rank} on host ${failure.host} in round ${failure.round}: ${failure.summary}`;
    write(part.failure, [where, failure.text].filter(Boolean).join("\n"));
  }
  const many = ranks.length > RANK_ROWS;
  showLegend(part.legend, ranks, many);
  if (many) {
    // Ranks that keep others waiting come first; of those that wait, a few are enough.
    const problems = ranks.filter((one) => PROBLEM.has(one.state)).sort(worstFirst);
    const blamed = problems.filter((one) => one.state !== "stuck").length;
    const named = problems.slice(0, Math.min(PROBLEMS, Math.max(blamed + 2, 6)));
    showRankRows(part, named.map((one) => ({ kind: "rank", host: true, ...one })));
    show(part.table, named.length > 0);
    show(part.rest, problems.length > named.length);
    write(part.rest, `and ${count(problems.length - named.length)} more, below`);
    showCells(part, nodes, ranks);
  } else {
    const rows = nodes.flatMap((one) => [{ kind: "node", ...one }, ...one.ranks.map((rank) => ({ kind: "rank", ...rank }))]);
    show(part.table, rows.length > 0);
    show(part.rest, false);
    show(part.detail, false);
    part.cells.replaceChildren();
    part.cells.known?.clear();
    showRankRows(part, rows);
  }
}

const GENERATIONS = 5;

/** Which ranks were replaced, the last first. */
function showGenerations(part, generations) {
  const told = generations.filter((one) => one.what).slice(-GENERATIONS).reverse();
  show(part, told.length > 0);
  sync(part, told, (one) => `${one.round} ${one.generation}`, () => make("li", ""), (item, one) => {
    const when = number(one.at_unix) ? `, ${new Date(one.at_unix * 1000).toLocaleTimeString()}` : "";
    write(item, `generation ${one.generation} after ${(number(one.seconds) ?? 0).toFixed(2)} s${when}: ${one.what}`);
  });
}

const BLAME = ["failed", "lost", "stopped", "absent", "stuck"];
const worstFirst = (a, b) => BLAME.indexOf(a.state) - BLAME.indexOf(b.state) || a.rank.rank - b.rank.rank;

function showLegend(legend, ranks, many) {
  const amounts = new Map();
  for (const { state } of ranks) amounts.set(state, (amounts.get(state) ?? 0) + 1);
  show(legend, many);
  sync(legend, many ? Object.keys(STATES).filter((state) => amounts.has(state)) : [], (state) => state,
    () => make("li", "", status()), (item, state) => {
      const [sign, word] = STATES[state];
      showStatus(item.firstChild, state, sign, `${count(amounts.get(state))} ${word}`);
    });
}

function status() {
  return make("span", "state", make("span", "sign"), make("span", ""));
}

function showStatus(node, kind, sign, word) {
  classes(node, `state ${kind}`);
  attribute(node.firstChild, "aria-hidden", "true");
  write(node.firstChild, sign);
  write(node.lastChild, word);
}

function showRankRows(part, rows) {
  const all = rows.flatMap((one) =>
    one.kind === "rank" && part.open.has(one.key) ? [one, { ...one, kind: "detail" }] : [one]);
  sync(part.table.tBodies[0], all, (one) => `${one.kind} ${one.key}`, (one) => makeRankRow(part, one), showRankRow);
}

function makeRankRow(part, one) {
  if (one.kind === "node") {
    const cell = make("th", "", make("b", ""), status(), make("span", "dim"));
    cell.colSpan = RANK_COLUMNS.length;
    cell.scope = "rowgroup";
    return make("tr", "node", cell);
  }
  if (one.kind === "detail") {
    const cell = make("td", "", make("dl", "detail"));
    cell.colSpan = RANK_COLUMNS.length;
    return make("tr", "", cell);
  }
  const tr = row(...RANK_COLUMNS.map(([, kind]) => kind));
  const button = make("button", "plain");
  button.type = "button";
  button.addEventListener("click", () => {
    if (!part.open.delete(one.key)) part.open.add(one.key);
    showRuns(view.runs);
  });
  tr.owner = part;
  tr.cells[0].append(button);
  tr.cells[1].append(status());
  return tr;
}

function showRankRow(tr, one) {
  if (one.kind === "node") return showNode(tr.cells[0], one.node, one.ranks.length);
  if (one.kind === "detail") return showDetail(tr.cells[0].firstChild, one);
  const { rank, state } = one;
  const [sign, word] = STATES[state];
  classes(tr, PROBLEM.has(state) ? `problem ${state}` : state);
  write(tr.cells[0].firstChild, one.host ? `${rank.rank} on ${one.node.node?.host ?? "?"}` : rank.rank);
  attribute(tr.cells[0].firstChild, "aria-expanded", tr.owner.open.has(one.key));
  attribute(tr.cells[0].firstChild, "aria-label", `rank ${rank.rank}, details`);
  showStatus(tr.cells[1].firstChild, state, sign, word);
  const share = one.cpu === null ? "–" : `${Math.round(one.cpu * 100)} %`;
  const texts = [one.doing, one.since === null ? "" : seconds(one.since), one.output === null ? "–" : age(Math.floor(one.output)),
    state === "done" || state === "failed" ? "" : share, bytes(rank.memory_bytes), rank.pid];
  texts.forEach((text, index) => write(tr.cells[index + 2], text));
}

function showNode(cell, node, amount) {
  const [kind, sign, word] = NODE_STATES[node.status] ?? ["done", "", node.status ?? ""];
  const [name, state, more] = cell.children;
  write(name, nodeName(node));
  showStatus(state, kind, sign, word);
  const beat = number(node.beat_seconds);
  const parts = [node.node ? plural(amount || node.node.ranks || 0, "rank") : null, beat === null ? null : `heartbeat ${beat < 3 ? "just now" : `${seconds(beat)} ago`}`];
  write(more, parts.filter(Boolean).map((text) => ` · ${text}`).join(""));
}

function nodeName(node) {
  const host = node.node?.host;
  if (node.rank === null || node.rank === undefined) return `host ${host ?? "?"}`;
  return host ? `node ${node.rank} · ${host}` : `node ${node.rank}`;
}

function showDetail(detail, one) {
  const { rank, node, state } = one;
  const operation = rank.store_operation;
  const started = number(rank.started_unix);
  const facts = [
    ["state", STATES[state][1]],
    ["where", `${nodeName(node)}, local rank ${rank.local_rank ?? "?"}, pid ${rank.pid ?? "?"}`],
    ["why", rank.why],
    ["in the store", operation ? `${operation.operation} ${operation.keys} for ${seconds(operation.seconds)}` : lastAsked(rank)],
    ...list(rank.collectives).map((one) => [
      `group ${one.group}`, `${one.under_way ? "in" : "last"} ${one.call} #${one.number}, ${seconds(one.seconds)}${lateness(one)}`,
    ]),
    ["ended", rank.end],
    ["last output", one.output === null ? "none yet" : `${seconds(one.output)} ago`],
    ["CPU", number(rank.cpu_seconds) === null ? null : `${seconds(rank.cpu_seconds)} in all${one.cpu === null ? "" : `, ${Math.round(one.cpu * 100)} % now`}`],
    ["memory", number(rank.memory_bytes) === null ? null : bytes(rank.memory_bytes)],
    ["started", started ? `${new Date(started * 1000).toLocaleTimeString()}, ${seconds(Date.now() / 1000 - started)} ago` : null],
    ["connections", list(rank.store_connections).join(", ")],
  ].filter(([, text]) => text);
  sync(detail, facts.flatMap(([name, text]) => [["dt", name, name], ["dd", name, text]]), ([tag, name]) => tag + name,
    ([tag]) => make(tag, ""), (node, [, , text]) => write(node, text));
}

function showCells(part, nodes, ranks) {
  const wanted = ranks.slice(0, part.cellsMax);
  const allowed = new Set(wanted);
  // Many small nodes: one field of cells; few large ones: one field each.
  const fields = nodes.length > 64
    ? [{ key: "all", node: null, ranks: wanted }]
    : nodes.map((one) => ({ ...one, ranks: one.ranks.filter((rank) => allowed.has(rank)) }));
  sync(part.cells, fields, (field) => field.key,
    () => make("div", "", make("p", "node-line", make("b", ""), status(), make("span", "dim")), make("div", "cells")),
    (div, field) => {
      show(div.firstChild, field.node !== null);
      if (field.node) showNode(div.firstChild, field.node, field.ranks.length);
      sync(div.lastChild, field.ranks, (one) => one.key, (one) => makeCell(part, one), (cell, one) => {
        const [sign, word] = STATES[one.state];
        classes(cell, `cell ${one.state}`);
        write(cell, one.state === "running" ? one.rank.rank : `${sign}${one.rank.rank}`);
        attribute(cell, "aria-label", `rank ${one.rank.rank}, ${word}`);
        attribute(cell, "aria-pressed", part.chosen === one.key);
      });
    });
  const chosen = ranks.find((one) => one.key === part.chosen);
  show(part.detail, Boolean(chosen));
  if (chosen) showDetail(part.detail, chosen);
}

function makeCell(part, one) {
  const cell = make("button", "cell");
  cell.type = "button";
  cell.addEventListener("click", () => {
    part.chosen = part.chosen === one.key ? null : one.key;
    showRuns(view.runs);
  });
  return cell;
}

// ---- Waiting -------------------------------------------------------------------------------------------------------

function showWaiters(waiters, server) {
  const groups = new Map();
  for (const waiter of waiters) {
    const key = `${waiter.operation} ${waiter.keys}`;
    let group = groups.get(key);
    if (!group) groups.set(key, (group = { key, waiter, amount: 0, longest: 0, ranks: [], peers: [] }));
    group.amount++;
    group.longest = Math.max(group.longest, number(waiter.seconds) ?? 0);
    if (waiter.rank !== null && waiter.rank !== undefined && /^\d+$/.test(waiter.rank)) group.ranks.push(Number(waiter.rank));
    else group.peers.push(waiter.rank ?? waiter.peer);
  }
  const ordered = [...groups.values()].sort((a, b) => b.longest - a.longest);
  const total = number(server?.waiters_count) ?? waiters.length;
  write($("waiting-count"), total ? `${plural(total, "client")}${total > waiters.length ? `, the longest ${count(waiters.length)} of them` : ""}` : "");
  table("waiting", ordered, (group) => group.key, ["number", "key", "number", "wide"], (tr, group) => {
    const { waiter } = group;
    const further = (waiter.keys_count ?? 1) > 1 ? ` (${count(waiter.keys_count)} keys)` : "";
    fill(tr, count(group.amount), `${waiter.operation === "wait" ? "" : `${waiter.operation} `}${waiter.keys}${further}`,
      seconds(group.longest), who(group));
  });
}

function who(group) {
  const parts = [];
  if (group.ranks.length) parts.push(`rank${group.ranks.length === 1 ? "" : "s"} ${ranges(group.ranks)}`);
  parts.push(...group.peers.slice(0, 2));
  if (group.peers.length > 2) parts.push(`${count(group.peers.length - 2)} more`);
  return parts.join(", ");
}

// ---- Limits, operations, refusals ----------------------------------------------------------------------------------

function meter(share) {
  const bar = svg("svg", { class: "meter", "aria-hidden": "true" });
  bar.append(svg("rect", { x: 0, y: 0, height: "100%", width: 0 }));
  showMeter(bar, share);
  return bar;
}

function showMeter(bar, share) {
  const bounded = Math.min(1, Math.max(0, share));
  classes(bar, `meter${bounded >= 0.95 ? " full" : bounded >= 0.8 ? " high" : ""}`);
  attribute(bar.firstChild, "width", `${(bounded * 100).toFixed(1)}%`);
}

function showLimits(overview) {
  const server = overview.server ?? {};
  const held = (server.table_bytes ?? 0) + (server.buffer_bytes ?? 0);
  const rows = [
    ["memory", held, server.memory_max, bytes],
    ["connections", server.connections, server.connections_max, count],
    ["keys", server.keys, server.keys_max, count],
    ["queue items", server.queue_items, server.queue_items_max, count],
  ].filter(([, used]) => number(used) !== null);
  rows.push(["process", overview.process?.memory_bytes, null, bytes]);
  sync($("limits").tBodies[0], rows, ([name]) => name, ([name]) => {
    const head = make("th", "", name);
    head.scope = "row";
    return make("tr", "", head, make("td", "", meter(0)), make("td", "number"));
  }, (tr, [name, used, most, format]) => {
    const share = number(most) ? used / most : 0;
    show(tr.cells[1].firstChild, most !== null);
    showMeter(tr.cells[1].firstChild, share);
    const warning = share >= 0.95 ? "full: " : share >= 0.8 ? "high: " : "";
    const spent = number(overview.process?.cpu_seconds);
    const of = number(most) === null ? `, ${seconds(spent)} CPU` : ` of ${format(most)}`;
    write(tr.cells[2], `${warning}${format(used)}${of}`);
  });
}

function showOperations(totals, byOperation, step) {
  const sum = Object.values(totals).reduce((all, value) => all + value, 0);
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a]);
  show($("operations-table"), names.length > 0);
  show($("operations-none"), names.length === 0);
  sync($("operations-table").tBodies[0], names.slice(0, 40), (name) => name, () => {
    const tr = row("", "number", "number", "share");
    tr.cells[3].append(meter(0));
    return tr;
  }, (tr, name) => {
    const rate = list(byOperation[name]).at(-1);
    write(tr.cells[0], name);
    write(tr.cells[1], rate === undefined ? "–" : short(rate / step));
    write(tr.cells[2], count(totals[name]));
    showMeter(tr.cells[3].firstChild, sum ? totals[name] / sum : 0);
    classes(tr.cells[3].firstChild, "meter");
  });
}

const REASONS = {
  already_waiting: "a second wait while one was pending",
  connections: "too many connections",
  full: "the table was full",
  handshake: "did not speak the store's protocol (a port scan, or HTTP on the wrong port?)",
  handshake_timeout: "connected but sent nothing",
  memory: "memory was at its limit",
  message_timeout: "did not finish a message",
  not_a_number: "ADD or barrier on a value that is not a number",
  too_long: "a length over its limit",
  unknown_opcode: "an operation that does not exist",
  user: "came from another user of this machine",
  write_timeout: "did not read what it had asked for",
};

function showRefused(server) {
  const closed = Object.entries(server.closed ?? {}).sort((a, b) => b[1] - a[1]);
  const total = closed.reduce((sum, [, amount]) => sum + amount, 0);
  write($("refused-count"), `${count(total)} of ${count(server.accepted)} accepted`);
  table("refused", closed, ([reason]) => reason, ["number", ""], (tr, [reason, amount]) => {
    const known = REASONS[reason.replace(/[A-Z]/g, (letter, at) => (at ? "_" : "") + letter.toLowerCase()).replace(/[- ]/g, "_")];
    fill(tr, count(amount), known ? `${reason}: ${known}` : reason);
  });
}

function showOverview(overview) {
  const server = overview.server ?? {};
  write($("address"), server.address ?? location.host);
  write($("about"), `store, up ${seconds(server.uptime_seconds)} · tenfold ${overview.version ?? ""} · pid ${overview.process?.pid ?? "?"}`);
  write($("top-hint"), `tenfold top ${location.host}`);
  showLimits(overview);
  showRefused(server);
}

// ---- Keys, slow operations, clients: requested less often, and only while they are visible --------------------------

// A prefix is any bytes. Here it is percent-encoded, the same in the page's address and in a request to the API, so that
// "back" goes back, a link can be sent, and a key that is not text can be reached.
const SLASH = "%2F";

/** The prefix that is shown. Clients put a `/` in front of every key, which is not shown at the top of the tree. */
function prefix() {
  const wanted = /^#keys=(.*)$/.exec(location.hash)?.[1] ?? "";
  return wanted === SLASH ? "" : wanted.replace(/[^\w%.~!*'()-]/g, encodeURIComponent); // the user may have typed it
}

function encoded(text, hex) {
  return hex ? hex.replace(/../g, (pair) => (pair === "2f" ? SLASH : `%${pair.toUpperCase()}`)) : encodeURIComponent(text);
}

function readable(encodedText) {
  const parts = encodedText.match(/%[0-9a-f]{2}|[^%]/gi) ?? [];
  const bytes = parts.flatMap((part) => (part.length === 3 ? parseInt(part.slice(1), 16) : [...new TextEncoder().encode(part)]));
  return new TextDecoder().decode(new Uint8Array(bytes));
}

function goTo(wanted) {
  history.pushState(null, "", wanted === "" ? location.pathname : `#keys=${wanted}`);
  prefixChanged();
}

function prefixChanged() {
  shown.delete("keys");
  showCrumbs(prefix());
  keysPoll.now();
}

function showCrumbs(current) {
  const parts = current.match(/^%2F.*?(%2F|$)|.*?%2F|.+$/gi) ?? [];
  const crumbs = [{ name: "all keys", to: "" }];
  for (const part of parts) crumbs.push({ name: readable(part.replace(/^%2F(?=.)/i, "")), to: crumbs.at(-1).to + part });
  $("crumbs").replaceChildren(...crumbs.map((crumb, index) => {
    if (index === crumbs.length - 1) {
      const here = make("li", "", crumb.name);
      here.setAttribute("aria-current", "location");
      return here;
    }
    const button = make("button", "", crumb.name);
    button.type = "button";
    button.addEventListener("click", () => goTo(crumb.to));
    return make("li", "", button, index ? "" : " › ");
  }));
}

async function askKeys() {
  const wanted = prefix();
  let survey;
  try {
    survey = await ask(`api/keys?prefix=${wanted}`);
  } catch (problem) {
    return write($("keys-note"), `No answer about these keys: ${problem.message}`);
  }
  if (wanted !== prefix()) return; // the user has gone elsewhere meanwhile
  if (survey.counting) {
    setTimeout(() => keysPoll.now(), FAST);
    return write($("keys-note"), "Counting…");
  }
  view.survey = survey;
  view.keyRows = keyRows(survey);
  showKeys();
}

function keyRows(survey) {
  const from = String(survey.prefix ?? "");
  const start = (text) => (from === "" && text[0] === "/" ? 1 : text.startsWith(from) ? from.length : 0);
  const name = (text) => text.slice(start(text)) || text;
  const groups = list(survey.groups).map((group) => ({ ...group, isGroup: true, text: group.prefix, name: name(group.prefix), encoded: encoded(group.prefix, group.prefix_hex) }));
  const entries = list(survey.entries).map((entry) => ({ ...entry, isGroup: false, text: entry.key, name: name(entry.key), encoded: encoded(entry.key, entry.key_hex) }));
  return [...groups, ...entries];
}

function showKeys() {
  const { survey, keyRows: rows } = view;
  if (!survey) return;
  const queue = number(survey.queue_items) ? `, ${plural(survey.queue_items, "queue item")}` : "";
  write($("keys-count"), `${count(survey.keys)}, ${bytes(survey.bytes)}${queue}`);
  const limit = shown.get("keys") ?? ROWS;
  $("keys-table").classList.toggle("no-values", !view.overview?.values_allowed);
  show($("keys-table"), rows.length > 0);
  show($("keys-none"), rows.length === 0);
  sync($("keys-table").tBodies[0], rows.slice(0, limit), (one) => `${one.isGroup} ${one.kind} ${one.encoded}`, makeKeyRow, showKeyRow);
  more("keys", rows.length - limit, limit);
  const notes = [];
  if (survey.truncated) notes.push("There are more keys here than are listed.");
  if (survey.seconds_ago >= 10) notes.push(`As of ${seconds(survey.seconds_ago)} ago.`);
  if (view.overview && !view.overview.values_allowed) notes.push("Values are not shown: start the server with --dashboard-values to allow it.");
  write($("keys-note"), notes.join(" "));
}

function makeKeyRow(one) {
  const tr = row("key", "number", "number", "number", "number wide", "values");
  if (one.isGroup) {
    const button = make("button", "");
    button.type = "button";
    button.addEventListener("click", () => goTo(one.encoded));
    tr.cells[0].append(button);
  }
  return tr;
}

function showKeyRow(tr, one) {
  const { isGroup } = one;
  write(isGroup ? tr.cells[0].firstChild : tr.cells[0], one.name);
  write(tr.cells[1], isGroup ? count(one.keys) : one.kind === "queue" ? plural(one.items ?? 0, "item") : "");
  write(tr.cells[2], bytes(one.bytes));
  write(tr.cells[3], age(isGroup ? one.newest_seconds : one.age_seconds));
  write(tr.cells[4], isGroup ? age(one.oldest_seconds) : "");
  const allowed = Boolean(view.overview?.values_allowed) && !isGroup && one.kind !== "queue";
  if (allowed === (tr.cells[5].childElementCount > 0)) return;
  tr.cells[5].replaceChildren();
  if (!allowed) return;
  const button = make("button", "show-value", "value");
  button.type = "button";
  button.setAttribute("aria-label", `show the value of ${one.text}`);
  button.addEventListener("click", () => showValue(one));
  tr.cells[5].append(button);
}

async function showValue(entry) {
  write($("value-title"), entry.text);
  write($("value-note"), "asking …");
  write($("value-text"), "");
  $("value").showModal();
  try {
    const answer = await ask(`api/value?key=${entry.encoded}`);
    const isText = typeof answer.text === "string";
    write($("value-note"), `${bytes(answer.bytes)}, as ${isText ? "text" : "hexadecimal"}${answer.truncated ? "; only its beginning is shown" : ""}`);
    write($("value-text"), isText ? answer.text : hexDump(String(answer.hex ?? "")));
  } catch (problem) {
    write($("value-note"), problem.message);
  }
}

/** 16 bytes per line: the offset, in hexadecimal, as characters. */
function hexDump(hex) {
  const lines = [];
  for (let at = 0; at < hex.length; at += 32) {
    const pairs = hex.slice(at, at + 32).match(/../g) ?? [];
    const letters = pairs.map((pair) => parseInt(pair, 16)).map((code) => (code >= 32 && code < 127 ? String.fromCharCode(code) : "·"));
    lines.push(`${(at / 2).toString(16).padStart(4, "0")}  ${pairs.join(" ").padEnd(47)}  ${letters.join("")}`);
  }
  return lines.join("\n");
}

async function askSlow() {
  const slow = list(await ask("api/slow")).slice().sort((a, b) => b.microseconds - a.microseconds);
  const columns = ["number", "short", "key", "number", "number wide", "short extra"];
  table("slow", slow.map((one, place) => ({ ...one, place })), (one) => one.place, columns, (tr, one) => {
    const further = one.keys_count > 1 ? ` (${count(one.keys_count)} keys)` : "";
    fill(tr, microseconds(one.microseconds), one.operation, `${one.key ?? ""}${further}`, bytes(one.bytes), age(Math.floor(one.seconds_ago)), one.peer);
  });
}

async function askClients() {
  const limit = shown.get("clients") ?? ROWS;
  const answer = await ask(`api/clients?limit=${limit}`);
  const clients = list(answer.clients);
  write($("clients-count"), count(answer.count));
  table("clients", clients, (client) => client.peer, ["short", "", "number", "number wide", "number", "number"], (tr, client) => {
    const last = `${client.last_operation ?? "–"}${client.waits ? " (waits)" : ""}`;
    fill(tr, client.peer, last, seconds(client.idle_seconds), seconds(client.connected_seconds), bytes(client.bytes_in), bytes(client.bytes_out));
  });
  more("clients", limit < 1000 ? answer.count - clients.length : 0, limit);
}

// ---- Asking --------------------------------------------------------------------------------------------------------

const view = { runs: [], waiters: [], overview: null, history: null, survey: null, keyRows: [], said: null, lastAnswer: null };

class NoAnswer extends Error {}

/** One answer of the API; an error of the server has its own text. */
async function ask(path) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), PATIENCE);
  try {
    const answer = await fetch(path, { signal: abort.signal, cache: "no-store" });
    const body = await answer.json();
    if (!answer.ok) throw new Error([body.error, body.hint].filter(Boolean).join("; ") || `status ${answer.status}`);
    return body;
  } catch (problem) {
    throw new NoAnswer(problem.message);
  } finally {
    clearTimeout(timer);
  }
}

/** Repeats `work`, one at a time: the next waits for the last, however slow the server is. */
function poll(period, work, wanted = () => true) {
  let timer = null;
  let busy = false;
  let again = false;
  const turn = async () => {
    clearTimeout(timer);
    if (busy) return void (again = true);
    const from = performance.now();
    if (!document.hidden && wanted()) {
      busy = true;
      try {
        await work();
      } catch (problem) {
        // The fast poll reports that the server does not answer; any other error is a bug of this page.
        if (!(problem instanceof NoAnswer)) console.error(problem);
      }
      busy = false;
    }
    const spent = performance.now() - from;
    timer = setTimeout(turn, again ? 0 : Math.max(period / 4, period * view.slowness - spent));
    again = false;
  };
  return { now: turn };
}

view.slowness = 1; // grows while the server does not answer

async function askAll() {
  const [overview, runs, waiters, past] = await Promise.allSettled(
    ["api/overview", "api/runs", "api/waiters", "api/history"].map(ask));
  if (overview.status === "rejected") return lost();
  live();
  const isFirst = view.overview === null;
  view.overview = overview.value;
  if (isFirst) showKeys(); // they may have arrived before it was known whether values are shown
  if (runs.status === "fulfilled") view.runs = list(runs.value);
  if (waiters.status === "fulfilled") view.waiters = list(waiters.value);
  if (past.status === "fulfilled") view.history = past.value;
  const server = view.overview.server ?? {};
  showOverview(view.overview);
  showVerdicts(view.runs, view.waiters, server);
  showRuns(view.runs);
  showWaiters(view.waiters, server);
  if (view.history) showHistory(view.history, server);
}

function live() {
  view.lastAnswer = new Date();
  view.slowness = 1;
  show($("gone"), false);
  document.body.classList.remove("stale");
  const pulse = $("pulse");
  pulse.className = "pulse live";
  void pulse.offsetWidth; // restarts the animation
  pulse.classList.add("beat");
  write($("pulse-text"), "live");
}

function lost() {
  view.slowness = Math.min(5, view.slowness + 0.5);
  const last = view.lastAnswer;
  const since = last ? `no answer for ${seconds((Date.now() - last) / 1000)}` : "no answer";
  $("pulse").className = "pulse lost";
  write($("pulse-text"), since);
  document.body.classList.toggle("stale", Boolean(last));
  show($("gone"), true);
  write($("gone"), last
    ? `✕ The server at ${location.host} does not answer. What you see is from ${last.toLocaleTimeString("en-GB")}; trying again.`
    : `✕ The server at ${location.host} does not answer; trying again.`);
}

/** Is this part open and on the screen? */
const visible = new Set();
const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) visible.delete(target.id);
    else if (!visible.has(target.id)) {
      visible.add(target.id);
      polls[target.id]?.now();
    }
  }
}, { rootMargin: "200px" });
const seen = (id) => () => $(id).open && visible.has(id);

// ---- Light and dark ------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function stored() {
  try {
    return localStorage.getItem("tenfold-theme");
  } catch {
    return null; // no storage: the choice lasts as long as the page
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  write($("theme"), `theme: ${theme}`);
  try {
    localStorage.setItem("tenfold-theme", theme);
  } catch {
    // As above.
  }
}

// ---- Start ---------------------------------------------------------------------------------------------------------

setTheme(THEMES.includes(stored()) ? stored() : "auto");
$("theme").addEventListener("click", () => {
  const current = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(current) + 1) % THEMES.length]);
});

view.operations = new Chart("operations", "operations per second", short, { stacked: true });
view.traffic = new Chart("traffic", "bytes per second, in / out", bytes, { isBytes: true });
view.connections = new Chart("connections", "clients connected / waiting", short);
view.memory = new Chart("memory", "memory for keys and buffers", bytes, { isBytes: true });

const fastPoll = poll(FAST, askAll);
const keysPoll = poll(SLOW, askKeys, seen("keys"));
const polls = { keys: keysPoll, slow: poll(SLOW, askSlow, seen("slow")), clients: poll(SLOW, askClients, seen("clients")) };
for (const id of Object.keys(polls)) {
  observer.observe($(id));
  $(id).addEventListener("toggle", () => polls[id].now());
}
for (const [id, redraw] of [["waiting", () => showWaiters(view.waiters, view.overview?.server)], ["keys", showKeys], ["slow", () => polls.slow.now()], ["clients", () => polls.clients.now()]]) {
  $(`${id}-more`).addEventListener("click", () => {
    shown.set(id, Math.min(1000, (shown.get(id) ?? FIRST[id] ?? ROWS) * 5));
    redraw();
  });
}
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) for (const one of [fastPoll, ...Object.values(polls)]) one.now();
});
window.addEventListener("popstate", prefixChanged);
showCrumbs(prefix());
fastPoll.now();
