// The dashboard: shows what the daemon says, as text, and asks it for what a person does.
const MEMORY = "meshtrain-key"; // of this address and port alone, other than cookies
const LINES_MAX = 2000, RETRY_MS = 2000, TOAST_MS = 8000;
const state = { jobs: [], peers: [], charts: new Map(), links: new Map(), machines: {} };
const plots = {};
let key = localStorage.getItem(MEMORY) ?? "", chosen = null, reading = null, toastTimer = 0, locked = false;

const $ = (id) => document.getElementById(id);
function made(tag, attributes = {}, ...children) {
  const svg = ["g", "line", "circle", "text", "path", "title", "defs", "marker"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // texts become text nodes: what others wrote is never markup
  return node;
}
const time = (at_s) => new Date(at_s * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const bytes = (count) => { let unit = 0; while (count >= 1024 && unit < 4) { count /= 1024; unit++; }
  return `${unit && count < 10 ? count.toFixed(1) : Math.round(count)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`; };
const seconds = (s) => s < 1 ? `${Math.round(s * 1000)} ms` : s < 90 ? `${s.toFixed(1)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
const short = (x) => x == null ? "–" : Math.abs(x) >= 1000 ? Math.round(x).toString() : Number(x.toPrecision(4)).toString();
const say = (text) => { $("toast").textContent = text; clearTimeout(toastTimer); toastTimer = setTimeout(() => { $("toast").textContent = ""; }, TOAST_MS); };
const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };

async function ask(path, options = {}) {
  const reply = await fetch(path, { ...options, headers: { "x-meshtrain-key": key, ...options.headers } });
  if (reply.ok) return reply;
  const why = (await reply.json()).error;
  if (reply.status === 401) lock(why);
  throw new Error(why);
}
const post = async (path, body) => (await ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) })).json();
async function act(path, body, done, button = null) {
  if (button) button.disabled = true;
  try { say(done(await post(path, body))); } catch (error) { say(error.message); } finally { if (button) button.disabled = false; }
}
function lock(why) {
  locked = true; reading?.abort();
  $("content").hidden = true; $("locked").hidden = false;
  $("locked-why").textContent = why; $("connection").textContent = "no session";
}

// The event stream. Not EventSource, which cannot show the key.
async function watch() {
  while (!locked) {
    try {
      const reader = (await ask("/api/events")).body.pipeThrough(new TextDecoderStream()).getReader();
      connected(true);
      for (let rest = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(part) ?? [];
          if (name) show[name]?.(JSON.parse(data));
        }
      }
      connected(false, "the daemon has ended the connection");
    } catch (error) { if (!locked) connected(false, error.message); }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}
function connected(is, why) {
  $("connection").className = is ? "" : "lost";
  set($("connection"), is ? "live" : `not connected: ${why}. Trying again`);
  if (is) $("content").hidden = false;
}

// A table keeps its rows, so that a button in one keeps the focus while figures change.
function fill(body, items, id, cells, buttons) {
  const old = new Map([...body.children].map((row) => [row.dataset.id, row]));
  items.forEach((item, at) => {
    const texts = cells(item);
    let row = old.get(id(item));
    if (!row) {
      row = made("tr", { "data-id": id(item) }, ...texts.map((_, i) => made(i ? "td" : "th", i ? {} : { scope: "row" })));
      if (buttons) row.insertBefore(made("td"), row.children[2]);
    }
    texts.forEach((cell, i) => {
      const [text, style] = Array.isArray(cell) ? cell : [cell, ""];
      const place = row.children[buttons && i > 1 ? i + 1 : i];
      set(place, String(text)); place.className = style;
    });
    if (buttons) {
      const wanted = buttons(item), last = row.children[2];
      if (last.dataset.state !== wanted.state) {
        last.dataset.state = wanted.state;
        last.replaceChildren(...wanted.made.flatMap((one) => [one, " "]));
      }
    }
    old.delete(id(item));
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
  for (const row of old.values()) row.remove();
}
const number = (text) => [text, "number"];
const STATES = { linked: "good", paired: "", waiting: "warn", seen: "" };
const PARTS = { in: "good", back: "good", done: "good", loading: "warn", forwards: "warn", rests: "warn", lost: "bad", refused: "bad", ended: "bad" };
const mbit = (bytes_s) => `${short(bytes_s * 8 / 1e6)} Mbit/s`;
const linkOf = (peer) => state.peers.filter((other) => other.name === peer.name).length === 1 ? state.links.get(peer.name) : undefined;
function rateOf(peer) {
  if (peer.measured) return `${mbit(peer.measured.send_bytes_s)} out, ${mbit(peer.measured.receive_bytes_s)} in, measured ${time(peer.measured.at_s)}`;
  const link = peer.state === "linked" ? linkOf(peer) : undefined;
  return link ? (link.bytes_per_s == null ? "never full" : mbit(link.bytes_per_s)) : "–";
}
const percent = (part) => part == null ? "–" : `${Math.round(100 * part)} %`;
function machineOf(peer) {
  const { busy, celsius, battery, plugged } = (peer.own || peer.state === "linked" ? state.machines[peer.device] : null) ?? {};
  return [percent(busy), celsius == null ? "–" : `${Math.round(celsius)} °C`, percent(battery) + (battery != null && plugged === false ? ", unplugged" : "")].map(number);
}
function sentOn(peer) {
  const link = peer.state === "linked" ? linkOf(peer) : undefined;
  return link ? bytes(link.sent_bytes) + (link.spared_bytes ? `, ${bytes(link.spared_bytes)} packed away` : "") : "–";
}
const software = (one) => one ? `Python ${one.python}, ${one.torch ? `torch ${one.torch}` : "no torch"}, ${one.system}` : "–";

const show = {
  status(status) {
    const before = state.links;
    state.status = status;
    state.links = new Map(status.links.map((link) => [link.name, { ...link, busy: link.sent_bytes !== (before.get(link.name)?.sent_bytes ?? link.sent_bytes) }]));
    set($("own-name"), `on ${status.name}`);
    document.title = `${status.name}: meshtrain`;
    show.problems(); devices();
  },
  problem(text) { state.problem = text; show.problems(); },
  problems() {
    const texts = [...(state.problem ? [state.problem] : []), ...(state.status?.warnings ?? [])];
    if ($("problems").dataset.texts !== texts.join("\n")) {
      $("problems").dataset.texts = texts.join("\n");
      $("problems").replaceChildren(...texts.map((text) => made("p", {}, text)));
    }
  },
  peers(peers) { state.peers = peers; devices(); },
  machines(machines) { state.machines = machines; devices(); },
  codecs({ processor, rows }) {
    set($("prices-note"), `Bits: at most, where they follow the values. Loss: measured in step, 120 steps of a small GPT. ${processor ? `Processor: timed here (${processor})` : "Processor: not timed yet; meshtrain plan SCRIPT does"}.`);
    $("codec-names").replaceChildren(...rows.map((row) => made("option", { value: row.name })));
    fill($("codecs"), rows, (row) => row.name, (row) => [
      row.name, number((row.fixed ? "" : "≤ ") + short(row.bits)), number(`${short(row.bits / 0.32)} %`),
      number(row.value_s == null ? "–" : seconds(row.value_s * 1e6)), row.loss, row.exchange, number(row.state_bytes ? bytes(row.state_bytes) : "–"), row.about,
    ]);
  },
  jobs(jobs) {
    state.jobs = jobs;
    $("no-jobs").hidden = jobs.length > 0; $("job-shown").hidden = !jobs.length;
    options($("job-choice"), jobs.map((job) => [job.job, `${job.name} (${job.job}) ${job.state}`]));
    for (const id of state.charts.keys()) if (!jobs.some((job) => job.job === id)) state.charts.delete(id);
    if (!jobs.some((job) => job.job === chosen)) choose((jobs.find((job) => !job.ended) ?? jobs[0])?.job ?? null);
    job(); ring();
  },
  chart(chart) { state.charts.set(chart.job, chart); if (chart.job === chosen) draw(); },
  events(events) {
    const list = $("events"), newest = Number(list.firstChild?.dataset.number ?? 0);
    $("no-events").hidden = events.length > 0;
    if (events.length && events.at(-1).number < newest) list.replaceChildren(); // another life of the daemon
    for (const one of events) {
      if (one.number > Number(list.firstChild?.dataset.number ?? 0)) list.prepend(made("li", { "data-number": one.number }, made("time", {}, time(one.at_s)), one.text));
    }
    while (list.children.length > events.length) list.lastChild.remove();
  },
  pairing(pairing) {
    const lines = [];
    if (pairing?.code) {
      const where = pairing.addresses.length ? ` --at ${pairing.addresses[0].includes(":") ? `[${pairing.addresses[0]}]` : pairing.addresses[0]}:${pairing.port}` : "";
      lines.push(made("p", { class: "code" }, pairing.code), made("p", {}, "On the other device, until ", time(pairing.expires_at_s), ": ", made("code", {}, `meshtrain pair ${pairing.code}${where}`)));
    } else if (pairing?.error) lines.push(made("p", { class: "notice" }, pairing.error));
    else if (pairing?.paired) lines.push(made("p", { class: "good" }, `Paired with ${pairing.paired}.`));
    const text = JSON.stringify(pairing);
    if ($("code-shown").dataset.state !== text) { $("code-shown").dataset.state = text; $("code-shown").replaceChildren(...lines); }
    $("show-code").hidden = Boolean(pairing?.code); $("hide-code").hidden = !pairing?.code;
  },
};

function devices() {
  if (!state.status) return;
  const own = state.status, rows = [{ device: own.device, name: own.name, own: true, state: "this device", software: own.software }, ...state.peers];
  fill($("peers"), rows, (peer) => peer.device, (peer) => [
    peer.name, [peer.state, STATES[peer.state] ?? ""], ...machineOf(peer), peer.own ? "–" : peer.added_by ?? (peer.state === "seen" ? "–" : "a code"),
    number(peer.rtt_s == null ? "–" : seconds(peer.rtt_s)), number(peer.own ? "–" : rateOf(peer)), number(sentOn(peer)),
    number(peer.measured?.peer_speed ? `${short(peer.measured.peer_speed)}x this one` : "–"), number(peer.cores ?? "–"),
    number(peer.memory_bytes ? bytes(peer.memory_bytes) : "–"), peer.refused ? [peer.refused, "bad"] : software(peer.software),
  ], (peer) => {
    const button = (text, name, run) => { const one = made("button", { type: "button", "aria-label": `${text} ${name}` }, text); one.onclick = () => run(one); return one; };
    const remove = (text) => button(text, peer.name, (one) => confirm(`${text} ${peer.name}?`, "Its link is dropped, and it may run nothing here. Only a code takes it in again.", text, "Also those that joined by its word")
      .then((also) => also !== null && act("/api/unpair", { peer: peer.device, introduced: also }, (reply) => `Removed: ${reply.removed.map((each) => each.name).join(", ")}.${reply.others.length ? ` It is still trusted by others; type there: meshtrain unpair ${peer.device.slice(0, 8)}` : ""}`, one)));
    const accept = () => button("Accept", peer.name, (one) => act("/api/pair/accept", { peer: peer.device }, () => `${peer.name} is trusted now`, one));
    return { state: peer.state, made: peer.own || peer.state === "seen" ? [] : peer.state === "waiting" ? [accept(), remove("Refuse")] : [remove("Remove")] };
  });
  $("measure").hidden = !state.peers.some((peer) => peer.state === "linked");
  ring();
}

// This device and those that it knows, on a circle. Of links between others it knows what the members of the job report.
function ring() {
  if (!state.status) return;
  const shown = state.jobs.find((one) => one.job === chosen && !one.ended);
  const parts = new Map((shown?.members ?? []).map((member) => [member.device, member]));
  const nodes = [{ device: state.status.device, name: state.status.name, state: "own" }, ...state.peers.filter((peer) => peer.state === "linked" || peer.state === "paired")];
  const [width, height, many] = [420, 300, nodes.length > 12], two = nodes.length === 2;
  nodes.forEach((node, at) => {
    const angle = (two ? Math.PI : -Math.PI / 2) + (2 * Math.PI * at) / nodes.length;
    const far = nodes.length > 1 ? 1 : 0;
    node.x = width / 2 + far * 140 * Math.cos(angle); node.y = height / 2 + far * 98 * Math.sin(angle);
  });
  const radius = many ? 7 : 15, lines = [], marks = [], words = [], debts = [];
  for (const node of nodes.slice(1)) {
    const link = node.state === "linked", busy = link && linkOf(node)?.busy;
    lines.push(made("line", { x1: nodes[0].x, y1: nodes[0].y, x2: node.x, y2: node.y, class: `link ${link ? (busy ? "busy" : "") : "away"}` }));
    const rate = node.measured ? mbit(node.measured.send_bytes_s) : link && linkOf(node)?.bytes_per_s ? mbit(linkOf(node).bytes_per_s) : "";
    const about = link ? [node.rtt_s == null ? "" : seconds(node.rtt_s), rate].filter(Boolean).join(", ") : "";
    if (about && !many) marks.push(made("text", { x: nodes[0].x + (node.x - nodes[0].x) * 0.55, y: nodes[0].y + (node.y - nodes[0].y) * 0.55 - 5, class: "soft" }, about));
    words.push(`${node.name}: ${link ? `linked${about ? `, ${about}` : ""}` : "cannot be reached"}`);
  }
  const places = new Map(nodes.map((node) => [node.device, node])), place = (rank) => places.get(shown.members[rank]?.device);
  for (const [first, second, rate] of shown?.links ?? []) {
    const from = place(first), to = place(second);
    if (!from || !to || from === nodes[0] || to === nodes[0]) continue;
    lines.push(made("line", { x1: from.x, y1: from.y, x2: to.x, y2: to.y, class: `link between ${rate ? "busy" : ""}` }));
    if (many || !rate) continue;
    marks.push(made("text", { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 - 5, class: "soft" }, mbit(rate)));
    words.push(`${from.name} and ${to.name}: ${mbit(rate)}`);
  }
  for (const [debtor, creditor, owed] of shown?.owed ?? []) {
    const from = place(creditor), to = place(debtor);
    if (!from || !to) continue;
    const [dx, dy] = [to.x - from.x, to.y - from.y], length = Math.hypot(dx, dy) || 1, away = radius + 5;
    const [x1, y1, x2, y2] = [from.x + dx / length * away, from.y + dy / length * away, to.x - dx / length * away, to.y - dy / length * away];
    const [bx, by] = [(x1 + x2) / 2 - dy / 6, (y1 + y2) / 2 + dx / 6];
    lines.push(made("path", { d: `M${x1} ${y1} Q${bx} ${by} ${x2} ${y2}`, class: "waits" }));
    if (owed && !many) marks.push(made("text", { x: x1 * 0.7 + x2 * 0.3 - dy / 5, y: y1 * 0.7 + y2 * 0.3 + dx / 5, class: "soft" }, `≤ ${bytes(owed)}`));
    debts.push(`${to.name} owes ${from.name} ${owed ? `up to ${bytes(owed)} of a round` : "its part of a round"}`);
  }
  for (const node of nodes) {
    const part = parts.get(node.device)?.part ?? "";
    marks.push(made("circle", { cx: node.x, cy: node.y, r: radius, class: `node ${node.state === "paired" ? "away" : node.state} ${["warn", "bad"].includes(PARTS[part]) ? PARTS[part] : ""}` }, made("title", {}, node.name)));
    const above = node.y < height / 2 - 40, label = node.name.length > 16 ? `${node.name.slice(0, 15)}…` : node.name;
    const y = above ? node.y - radius - (part && !many ? 19 : 6) : node.y + radius + 14;
    if (nodes.length <= 24) marks.push(made("text", { x: node.x, y }, label));
    if (part && !many) marks.push(made("text", { x: node.x, y: y + 13, class: "soft" }, part));
  }
  const arrow = made("defs", {}, made("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, made("path", { d: "M0 0L8 4L0 8z" })));
  $("ring").classList.toggle("many", many);
  $("ring").replaceChildren(arrow, ...lines, ...marks);
  $("ring").setAttribute("aria-label", `${state.status.name} and its links. ${[...words, ...debts].join(". ") || "No other device is paired"}.`);
  set($("ring-note"), nodes.length < 2 ? "No other device is paired yet." : `Green lines: this device's own links. ${lines.some((line) => line.classList.contains("between")) ? "Blue: what others send each other in the job, as they report it. " : ""}They move while gradients travel.${debts.length ? ` Arrows: who waits for whom. ${debts.slice(0, 6).join(". ")}${debts.length > 6 ? ` (${debts.length - 6} more)` : ""}.` : ""}`);
}

function options(select, wanted) {
  wanted.forEach(([value, text], at) => {
    const one = select.children[at] ?? select.appendChild(made("option"));
    if (one.value !== value) one.value = value;
    set(one, text);
  });
  while (select.children.length > wanted.length) select.lastChild.remove();
}
function choose(id) { chosen = id; $("job-choice").value = id ?? ""; job(); draw(); ring(); follow(); }
function job() {
  const one = state.jobs.find((each) => each.job === chosen);
  if (!one) return;
  $("job-choice").value = one.job;
  const facts = [["State", one.state + (one.waiting_for ? `; waits: ${one.waiting_for}` : "")], ["Round", one.round + (one.generation ? ` (generation ${one.generation})` : "")],
    ["Script", [one.script, ...[["began", one.started_at_s], ["ended", one.ended_at_s]].filter(([, at_s]) => at_s).map(([what, at_s]) => `${what} ${new Date(at_s * 1000).toLocaleString()}`)].join(", ")]];
  facts.push(["Models", one.equal == null ? "not compared yet" : one.equal ? `equal on all devices, ${one.hashes_compared} times compared` : "they differed"]);
  facts.push(...one.facts);
  const list = $("job-facts");
  facts.forEach(([name, text], at) => {
    while (list.children.length < 2 * at + 2) list.append(made("dt"), made("dd"));
    set(list.children[2 * at], name); set(list.children[2 * at + 1], text);
  });
  while (list.children.length > 2 * facts.length) list.lastChild.remove();
  const notes = JSON.stringify([one.notes, one.errors]);
  if ($("job-notes").dataset.notes !== notes) {
    $("job-notes").dataset.notes = notes;
    $("job-notes").replaceChildren(...one.notes.map((text) => made("p", { class: "notice" }, text)), ...one.errors.map((text) => made("p", { class: "notice error" }, text)));
  }
  fill($("members"), one.members, (member) => String(member.rank), (member) => [
    member.name, [member.part + (member.restarts ? ` (run ${member.restarts + 1})` : ""), PARTS[member.part] ?? ""],
    member.finished ? "(has finished)" : member.waits_for ?? "–", number(member.round), number(member.step),
    number(member.step_s ? seconds(member.step_s) : "–"), number(member.samples_per_s ? short(member.samples_per_s) : "–"), number(member.batch || "–"), number(member.ahead),
    number(member.age ?? "–"), number(member.nulls), number(seconds(member.exposed_s)), number(percent(member.overlap)),
    number(bytes(member.sent_bytes)), number(member.sends_bytes_s == null ? "–" : mbit(member.sends_bytes_s)),
    member.values.map(([name, value]) => `${name} ${short(value)}`).join(", ") || "–",
  ]);
  options($("log-rank"), one.members.map((member) => [String(member.rank), member.name]));
  const here = one.members.some((member) => member.device === state.status?.device);
  $("cancel").hidden = one.ended;
  $("leave").hidden = one.ended || one.members.length < 2 || !here;
  $("codec-form").hidden = !one.changes || !here;
}

function draw() {
  const chart = state.charts.get(chosen), points = chart?.points ?? [], last = points.at(-1);
  const name = chart?.value || "loss", style = getComputedStyle(document.documentElement), guess = state.jobs.find((one) => one.job === chosen)?.prediction;
  curve("loss", points.map((point) => [point[0], point[1]]), style);
  curve("rate", points.map((point) => [point[0], point[2]]), style, guess ? [guess.samples_s, guess.alone_samples_s] : []);
  set($("loss-caption"), last ? `${name}, mean of the devices: ${short(last[1])} at round ${last[0]}` : "loss by round: drawn while a page watches the job");
  set($("rate-caption"), (last ? `samples a second, all devices together: ${short(last[2])}` : "samples a second, by round") + (guess ? ` (dashed: predicted ${short(guess.samples_s)}, and ${short(guess.alone_samples_s)} for one laptop alone)` : ""));
}
function curve(id, points, style, levels = []) {
  const host = $(id), drawn = points.filter((point) => point[1] != null);
  const data = [drawn.map((point) => point[0]), drawn.map((point) => point[1]), ...levels.map((level) => drawn.map(() => level))];
  if (drawn.length < 2 || (plots[id] && plots[id].series.length !== data.length)) { plots[id]?.destroy(); delete plots[id]; }
  if (drawn.length < 2) return;
  if (plots[id]) { plots[id].setData(data); return; }
  const soft = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line"), axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
  plots[id] = new uPlot({ width: host.clientWidth || 300, height: 190, scales: { x: { time: false } }, legend: { show: false }, cursor: { show: false },
    axes: [{ ...axis, size: 30 }, { ...axis, size: 55 }], series: [{}, { stroke: style.getPropertyValue("--accent"), width: 2, points: { show: false } }, ...levels.map((_, at) => ({ stroke: at ? soft : style.getPropertyValue("--good"), width: 1.5, dash: [6, 4], points: { show: false } }))] }, data, host);
}
function redraw() { for (const id of Object.keys(plots)) { plots[id].destroy(); delete plots[id]; } draw(); }

// A log is read from near its end on, until another one is chosen.
async function follow() {
  reading?.abort();
  const own = reading = new AbortController(), id = chosen, rank = $("log-rank").value || "0";
  $("log").replaceChildren();
  for (let offset = null, retries = 0; id && !own.signal.aborted;) {
    try {
      const asked = new URLSearchParams({ job: id, rank, ...(offset === null ? {} : { offset }) });
      const piece = await (await ask(`/api/log?${asked}`, { signal: own.signal })).json();
      if (own.signal.aborted) return;
      const box = $("log");
      box.append(...piece.lines.map((line) => `${line}\n`));
      while (box.childNodes.length > LINES_MAX) box.firstChild.remove();
      if ($("log-follow").checked && piece.lines.length) box.scrollTop = box.scrollHeight;
      retries = offset === piece.offset_bytes && !piece.lines.length ? retries + 1 : 0;
      offset = piece.offset_bytes;
      if (piece.end) return;
    } catch (error) {
      if (own.signal.aborted || locked) return;
      if (!retries++) $("log").append(`(${error.message})\n`);
    }
    if (retries) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function confirm(title, text, yes, check) {
  const box = $("ask");
  $("ask-title").textContent = title; $("ask-text").textContent = text; $("ask-yes").textContent = yes;
  $("ask-check").checked = false; $("ask-check-text").textContent = check ?? ""; $("ask-more").hidden = !check;
  box.returnValue = "no";
  box.showModal();
  return new Promise((resolve) => {
    box.onclose = () => { if (!box.open) resolve(box.returnValue === "yes" ? $("ask-check").checked : null); }; // open: it was the question before
  });
}
$("job-choice").onchange = (event) => choose(event.target.value);
$("log-rank").onchange = follow;
$("measure").onclick = (event) => act("/api/measure", {}, (reply) => reply.failed.length ? reply.failed.map(([name, why]) => `${name} was not measured: ${why}`).join(". ") : "The links were measured.", event.target);
$("show-code").onclick = (event) => act("/api/pair/show", {}, () => "A code is being made.", event.target);
$("hide-code").onclick = (event) => act("/api/pair/hide", {}, () => "The code is taken back.", event.target);
$("join").onsubmit = (event) => {
  event.preventDefault();
  say("Looking for the device that shows this code.");
  act("/api/pair/join", { code: $("join-code").value, at: $("join-at").value || null }, (reply) => { $("join").reset(); return `Paired with ${reply.name}.`; }, event.submitter);
};
$("cancel").onclick = async (event) => {
  const id = chosen, now = await confirm("Cancel this job?", "It ends on all devices. What was learned so far is saved first.", "Cancel it", "At once: end the scripts, and save nothing");
  if (now !== null) act("/api/cancel", { job: id, now }, () => `Job ${id} is cancelled.`, event.target);
};
$("leave").onclick = async (event) => {
  const id = chosen;
  if (await confirm("Take this device out of the job?", "The other devices go on with it.", "Take it out") !== null) act("/api/leave", { job: id }, () => `This device has left job ${id}.`, event.target);
};
$("codec-form").onsubmit = async (event) => {
  event.preventDefault();
  const id = chosen, codec = $("codec-name").value.trim(), { submitter } = event;
  if (await confirm(`Go over to ${codec}?`, "From one of the next rounds on, all devices send their gradients in it. Nothing is lost that was left out before.", "Change it") !== null) {
    act("/api/codec", { job: id, codec }, (reply) => { $("codec-form").reset(); return `From round ${reply.first} on gradients travel in ${reply.now.codec}; before: ${reply.before.codec}.`; }, submitter);
  }
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(() => { for (const id of Object.keys(plots)) plots[id].setSize({ width: $(id).clientWidth || 300, height: 190 }); }).observe($("job"));

const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token) history.replaceState(null, "", location.pathname); // it is good once, and no history need keep it
try {
  if (token) { key = (await post("/api/session", { token })).key; localStorage.setItem(MEMORY, key); }
  await watch();
} catch (error) { lock(error.message); }
