// The page of a run: asks the coordinator each second how it is, and shows that. It changes nothing.

import { Chart, Timeline, bytes, duration, number, short, together } from "./charts.js";

const { h, render } = window.preact;
const { useEffect, useState } = window.preactHooks;
const html = window.htm.bind(h);

const EVERY_MS = 1000;
const AT_THE_END_MS = 100;
const PATIENCE_MS = 6000;
const GONE_SHOWN = 4;
const MOMENTS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000];

// --- asking ---

const ask = (path, more = {}) =>
  fetch(path, { cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(PATIENCE_MS), ...more });

async function logIn(token) {
  const body = JSON.stringify({ token });
  const answer = await ask("/page/login", { method: "POST", body, headers: { "Content-Type": "application/json" } });
  return answer.ok ? "" : answer.text();
}

class Refused extends Error {}

async function fetchJson(path, known = "") {
  const answer = await ask(path, known ? { headers: { "If-None-Match": known } } : {});
  if (answer.status === 401) throw new Refused(await answer.text());
  if (answer.status === 304) return [known, null];
  if (!answer.ok) throw new Error(await answer.text());
  return [answer.headers.get("ETag") || "", await answer.json()];
}

// A link may bring the right to look in its fragment, which no server and no log sees. It is used up at once.
async function useLink() {
  const code = decodeURIComponent(location.hash.slice(1));
  if (!code) return "";
  history.replaceState(null, "", location.pathname);
  return logIn(code);
}

// Calls `show` with what changes: state, past, refused, trouble. Returns how to stop.
function follow(show) {
  let version = "";
  let timer = 0;
  let over = false;
  let finished = false;
  let busy = false;
  async function look() {
    if (busy) return;
    busy = true;
    try {
      const [, state] = await fetchJson("/page/state");
      finished = state.finished !== null;
      const [newest, past] = await fetchJson("/page/history", version);
      version = newest;
      if (!over) show({ state, trouble: "", refused: null, ...(past ? { past, version } : {}) });
    } catch (error) {
      if (over) return;
      if (error instanceof Refused) { show({ refused: error.message }); return; }
      if (finished) { show({ trouble: "ended" }); return; }
      show({ trouble: "lost" });
    } finally {
      busy = false;
    }
    const wait = finished ? AT_THE_END_MS : EVERY_MS; // the last evaluation comes moments before the coordinator goes
    if (!over) timer = setTimeout(look, document.hidden ? 10 * EVERY_MS : wait);
  }
  look();
  const wake = () => { if (!document.hidden && !over) { clearTimeout(timer); look(); } };
  document.addEventListener("visibilitychange", wake);
  return () => { over = true; clearTimeout(timer); document.removeEventListener("visibilitychange", wake); };
}

// --- parts ---

function condition(state, trouble) {
  if (state.finished) return state.finished.exit_code === 0 ? ["finished", "good"] : [`ended: ${state.finished.why || "stopped"}`, "bad"];
  if (trouble) return ["reconnecting", "bad"];
  if (!state.settled) return ["asks the islands", "busy"];
  if (!state.liveness.length) return ["waits for islands", "busy"];
  return state.averaging ? ["averaging", "busy"] : ["training", "good"];
}

// Who is waited for, where anybody or anything waits; "" while all islands train.
function waits(state) {
  const stalls = !state.settled || !state.liveness.length || state.averaging || state.members.some((one) => one.state === "ready");
  if (state.finished || !stalls || !state.waiting_for.length) return "";
  const names = [...new Set(state.waiting_for)];
  const often = (name) => state.waiting_for.filter((one) => one === name).length;
  const shown = names.slice(0, 3).map((name) => (often(name) > 1 ? `${often(name)} x ${name}` : name));
  return `waits for ${shown.join(", ")}${names.length > 3 ? ` and ${names.length - 3} more` : ""}`;
}

function Header({ state, trouble }) {
  const [text, kind] = condition(state, trouble);
  return html`<header>
    <img src="/page/icon.svg" alt="" width="30" height="30" />
    <h1>${state.name}</h1><span class="pill ${kind}" id="condition">${text}</span>
    <span class="waits" id="waiting">${trouble ? "" : waits(state)}</span>
    <span class="aside">run ${state.coordinator.run.slice(0, 8)} · Atoll ${state.version}</span>
  </header>`;
}

function Tile({ title, value, children, share }) {
  const bar = share === undefined ? null : html`<div class="bar"><i style=${{ width: `${100 * Math.min(1, share)}%` }}></i></div>`;
  return html`<section class="card tile"><h2>${title}</h2><strong>${value}</strong>${bar}<p>${children}</p></section>`;
}

function saving(sent, parallel) {
  if (!sent || !parallel) return "nothing to compare with yet";
  const times = parallel / sent;
  if (times > 1 / 1.05 && times < 1.05) return "as data parallel would";
  const factor = Math.max(times, 1 / times);
  return `${number(factor, factor < 9.95 ? 1 : 0)}x ${times > 1 ? "less" : "more"} than data parallel`;
}

function Tiles({ state }) {
  const now = state.summary;
  const heldOut = now.eval_loss === null ? "not evaluated yet" : `held-out ${number(now.eval_loss, 3)} at step ${number(now.eval_step)}`;
  return html`<div class="tiles">
    <${Tile} title="Round" value=${`${number(state.round)} / ${number(state.num_rounds)}`} share=${state.round / state.num_rounds}>
      step ${number(now.step)} of ${number(now.max_steps)}<//>
    <${Tile} title="Loss" value=${number(now.loss, 3)}>${heldOut}<//>
    <${Tile} title="Goodput" value=${`${short(now.goodput_tokens_per_s)} tok/s`}>${short(now.tokens)} tokens committed<//>
    <${Tile} title="Utilisation" value=${now.utilisation === null ? "–" : `${number(100 * now.utilisation, 1)} %`}>
      ${now.sync_s === undefined || now.sync_s === null ? "nothing synced yet" : `last sync ${duration(now.sync_s)}, waited ${duration(now.waited_s)}`}<//>
    <${Tile} title="Sent" value=${bytes(now.sent_bytes)}>${saving(now.sent_bytes, now.data_parallel_bytes)}<//>
    <${Tile} title="Time left" value=${state.finished ? "over" : duration(now.eta_s)}>
      ${now.round_s === null ? "no pace yet" : `a round takes ${duration(now.round_s)}`}<//>
  </div>`;
}

function Notices({ state, trouble }) {
  return html`<div class="notices" role="status">
    ${trouble === "lost" && html`<p class="notice bad">The coordinator does not answer; trying again each second. Islands train on meanwhile. What you see is as of the last answer.</p>`}
    ${trouble === "ended" && html`<p class="notice">The run is over and its coordinator has ended. What you see is how it ended.</p>`}
    ${state.alarms.slice(-3).map((alarm) => html`<p class="notice bad">Alarm: ${alarm.what}: ${alarm.detail}</p>`)}
  </div>`;
}

function stateOf(member, finished) {
  if (member.state === "lost" || member.state === "left") return member.state;
  return finished ? "done" : member.connected ? member.state : "away";
}

function Island({ member, state, perRound }) {
  const shown = stateOf(member, state.finished);
  const gone = shown === "lost" || shown === "left";
  const whole = Object.values(state.participation).reduce((sum, one) => sum + one, 0);
  const weight = gone ? undefined : state.participation[member.seat];
  const done = Math.min(1, member.step / perRound);
  const bar = shown === "training" ? html`<span class="bar"><i style=${{ width: `${100 * done}%` }}></i></span>` : "";
  return html`<tr class=${gone ? "gone" : ""}>
    <td data-of="island"><b>${member.name}</b> <small>seat ${member.seat}</small></td>
    <td data-of="state"><span class="dot ${shown}"></span>${shown}</td>
    <td data-of="round">${member.round < 0 ? "–" : member.round} ${gone ? "" : html`<small>+ ${member.step} steps</small>`}${bar}</td>
    <td data-of="tokens a second">${gone ? "–" : number(member.tokens_per_s)}</td>
    <td data-of="weight">${weight === undefined || !whole ? "–" : `${number((100 * weight) / whole)} %`}</td>
    <td data-of="loss">${gone ? "–" : number(member.loss, 3)}</td>
    <td data-of="link">${member.link_bytes_per_s === null ? "–" : `${short(8 * member.link_bytes_per_s)}bit/s`}</td>
    <td data-of="heard">${duration(member.seen_s_ago)} ago</td>
  </tr>`;
}

function Islands({ state }) {
  const isGone = (member) => member.state === "lost" || member.state === "left";
  const gone = state.members.filter(isGone).sort((a, b) => a.seen_s_ago - b.seen_s_ago).slice(0, GONE_SHOWN);
  const shown = [...state.members.filter((member) => !isGone(member)), ...gone];
  const perRound = state.summary.max_steps / state.num_rounds;
  const head = ["island", "state", "round", "tok/s", "weight", "loss", "link", "heard"];
  return html`<section class="card" id="islands"><h2>Islands</h2>
    ${shown.length ? html`<table><thead><tr>${head.map((text) => html`<th>${text}</th>`)}</tr></thead>
      <tbody>${shown.map((one) => html`<${Island} key=${one.member} member=${one} state=${state} perRound=${perRound} />`)}</tbody></table>`
      : html`<p class="empty">None has come yet. On another machine: atoll join TOKEN</p>`}
  </section>`;
}

const clock = (at) => (at ? new Date(1000 * at).toLocaleTimeString("en-GB") : "");

function Events({ events }) {
  const line = (event) => {
    const seat = event.replica === null || event.replica === undefined || event.replica < 0 ? "" : `seat ${event.replica}`;
    const who = event.name ? html`${event.name} <small>${seat}</small>` : seat;
    const again = event.what === "void";
    const bad = (event.kind === "fault" && !again) || event.what === "lost" || event.what === "refused";
    return html`<li><time>${clock(event.at)}</time><span class="tag ${bad ? "bad" : ""}">${again ? "tried again" : event.what}</span>
      <span>${who}${event.round === null || event.round === undefined ? "" : html`<small>${seat ? ", " : " "}round ${event.round}</small>`}
      ${event.detail && html`<em>${event.detail}</em>`}</span></li>`;
  };
  return html`<section class="card" id="events"><h2>Events</h2>
    ${events.length ? html`<ol>${events.slice(-60).reverse().map(line)}</ol>` : html`<p class="empty">None yet.</p>`}</section>`;
}

function Charts({ past, version }) {
  const start = Math.min(...[...past.training, ...past.held_out].map(([, at]) => at).filter(Boolean));
  const bySteps = together(past.training.map(([step, , loss]) => [step, loss]), past.held_out.map(([step, , loss]) => [step, loss]));
  const timed = (points) => points.filter(([, at]) => at).map(([, at, loss]) => [at - start, loss]);
  const byTime = together(timed(past.training), timed(past.held_out));
  const ofRounds = (key, scale = 1) => past.progress.filter((one) => one[key]).map((one) => [one.step, scale * one[key]]);
  const loss = [{ label: "training", colour: "train" }, { label: "held-out", colour: "heldout", points: true }];
  const decade = (_, splits) => splits.map((value) => (Math.log10(value) % 1 === 0 ? value : null));
  const nats = (value) => number(value, value < 9.95 ? 2 : 1);
  return html`<div class="charts">
    <${Chart} id="by-steps" title="Loss against steps" axis="step" across=${short} format=${nats} data=${bySteps} lines=${loss} version=${version}
      wait="The first losses come with the first steps." />
    <${Chart} id="by-time" title="Loss against time" axis="time" across=${duration} steps=${MOMENTS} format=${nats} data=${byTime} lines=${loss} version=${version}
      wait="The first losses come with the first steps." />
    <${Chart} id="utilisation" title="Utilisation" axis="step" across=${short} format=${(value) => `${number(value)} %`} version=${version}
      data=${together(ofRounds("utilisation", 100))} lines=${[{ label: "trains, of its time", colour: "outer" }]}
      scale=${{ range: [0, 100] }} wait="Known once two rounds are committed." />
    <${Chart} id="bytes" title="Bytes sent" axis="step" across=${short} format=${bytes} version=${version} filter=${decade}
      data=${together(ofRounds("sent_bytes"), ofRounds("data_parallel_bytes"))} scale=${{ distr: 3 }}
      lines=${[{ label: "this run", colour: "train" }, { label: "data parallel", colour: "send", dash: [6, 4] }]}
      wait="Nothing was sent yet." />
  </div>`;
}

function Run({ state, past, version, trouble }) {
  const names = Object.fromEntries(
    [...state.members].sort((a, b) => b.seen_s_ago - a.seen_s_ago).map((member) => [member.seat, member.name]),
  );
  return html`<main>
    <${Header} state=${state} trouble=${trouble} />
    <${Notices} state=${state} trouble=${trouble} />
    <${Tiles} state=${state} />
    <${Islands} state=${state} />
    ${past && html`<${Charts} past=${past} version=${version} />`}
    ${past && html`<${Timeline} rounds=${past.rounds} names=${names} />`}
    ${past && html`<${Events} events=${past.events} />`}
    <footer>${[`coordinator ${state.coordinator.addresses[0]}`, `key ${state.coordinator.fingerprint.slice(0, 16)}`,
      `up ${duration(state.coordinator.uptime_s)}`, `anchor ${state.digest.slice(0, 12) || "–"}`].join(" · ")}</footer>
  </main>`;
}

function Login({ why, enter }) {
  const [token, setToken] = useState("");
  const [wrong, setWrong] = useState(why);
  const submit = async (event) => {
    event.preventDefault();
    try {
      const refused = await logIn(token.trim());
      if (refused) setWrong(refused);
      else enter();
    } catch {
      setWrong("the coordinator does not answer. Try again.");
    }
  };
  return html`<main class="login"><form class="card" onSubmit=${submit}>
    <h1><img src="/page/icon.svg" alt="" width="30" height="30" /> Atoll</h1>
    <label for="token">A token for this run</label>
    <input id="token" type="password" autocomplete="off" spellcheck="false" value=${token} onInput=${(event) => setToken(event.target.value)} />
    <button type="submit">Look</button>
    <p class="wrong" role="alert">${wrong}</p>
    <p class="hint">On the coordinator's machine, <code>atoll token create RUN --role watch</code> makes one that can look and do nothing else.</p>
  </form></main>`;
}

function App() {
  const [seen, setSeen] = useState({ trouble: "" });
  const [entries, setEntries] = useState(0);
  useEffect(() => {
    let stop = () => {};
    let gone = false;
    useLink().catch(() => "").then((why) => {
      if (gone) return;
      stop = follow((change) => setSeen((before) => ({ ...before, ...(change.refused && why ? { refused: why } : change) })));
    });
    return () => { gone = true; stop(); };
  }, [entries]);
  const enter = () => { setSeen({ trouble: "" }); setEntries(entries + 1); };
  if (seen.refused) return html`<${Login} why=${seen.state || seen.refused !== "log in with a token." ? seen.refused : ""} enter=${enter} />`;
  if (seen.state) return html`<${Run} ...${seen} />`;
  return html`<main class="login"><p class="empty">${seen.trouble ? "The coordinator does not answer; trying again." : "…"}</p></main>`;
}

render(html`<${App} />`, document.getElementById("app"));
