// Charts by uPlot, and the timeline of the last rounds, which is plain boxes.

const { h } = window.preact;
const { useEffect, useRef, useState } = window.preactHooks;
const html = window.htm.bind(h);

// --- words for numbers ---

export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  const units = ["", " k", " M", " G", " T", " P"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return number(value, unit && value < 10 ? 1 : 0) + units[unit];
}

export const bytes = (value) => (value === null || value === undefined ? "–" : `${short(value)}${value < 1000 ? " " : ""}B`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds > 0 && seconds < 0.0995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 59.5) return `${number(seconds, seconds < 9.95 && seconds % 1 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${Math.floor(seconds / 60)}m${String(Math.floor(seconds % 60)).padStart(2, "0")}s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)}h${String(minutes % 60).padStart(2, "0")}m`;
  return `${Math.floor(minutes / 1440)}d${String(Math.floor((minutes % 1440) / 60)).padStart(2, "0")}h`;
}

// --- lines ---

const FEW = 40; // points that are told apart

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function axis(format, size, filter) {
  const only = filter ? { filter } : {}; // uPlot takes what is undefined for a wish
  const line = { stroke: colour("line"), width: 1, ...only };
  return {
    ...only, stroke: colour("soft"), grid: line, ticks: line, size, font: "12px system-ui, sans-serif",
    values: (_, splits) => splits.map((value) => (value === null ? "" : format(value))),
  };
}

function options(props, width) {
  // Where the pointer is, or else the newest.
  const shown = (format) => (plot, value, series, index) => {
    const known = plot.data[series].filter((one) => one !== null);
    const seen = index === null || index === undefined ? known[known.length - 1] : value;
    return seen === null || seen === undefined ? "–" : format(seen);
  };
  const lines = props.lines.map((line) => ({
    label: line.label, stroke: colour(line.colour), width: 2, spanGaps: true, dash: line.dash, value: shown(props.format),
    points: { show: (plot) => line.points || plot.data[0].length < FEW, size: 6, fill: colour(line.colour) },
  }));
  return {
    width, height: 230, padding: [10, 12, 0, 0], cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: false }, y: props.scale || {} },
    axes: [{ ...axis(props.across, 34), space: 70, ...(props.steps ? { incrs: props.steps } : {}) }, { ...axis(props.format, 58, props.filter), space: 34 }],
    series: [{ label: props.axis, value: shown(props.across) }, ...lines],
  };
}

export function Chart(props) {
  const place = useRef(null);
  const plot = useRef(null);
  const [theme, setTheme] = useState(0);
  const empty = !props.data[0].length;

  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const change = () => setTheme((count) => count + 1);
    media.addEventListener("change", change);
    return () => media.removeEventListener("change", change);
  }, []);

  useEffect(() => {
    if (empty) return undefined;
    plot.current = new window.uPlot(options(props, place.current.clientWidth), props.data, place.current);
    const observer = new ResizeObserver(() => {
      plot.current.setSize({ width: place.current.clientWidth, height: 230 });
    });
    observer.observe(place.current);
    return () => { observer.disconnect(); plot.current.destroy(); };
  }, [theme, empty]);

  useEffect(() => { if (!empty && plot.current) plot.current.setData(props.data); }, [props.version]);

  return html`<section class="card chart" id=${props.id}>
    <h2>${props.title}</h2>
    ${empty ? html`<p class="empty">${props.wait}</p>` : html`<div class="plot" ref=${place}></div>`}
  </section>`;
}

// [[x, y], ...] of several lines as uPlot wants them: all x, then each line's y at these or null.
export function together(...lines) {
  const tables = lines.map((points) => new Map(points));
  const xs = [...new Set(lines.flatMap((points) => points.map(([x]) => x)))].sort((a, b) => a - b);
  return [xs, ...tables.map((table) => xs.map((x) => table.get(x) ?? null))];
}

// --- the timeline ---

const MOST_LANES = 24;
export const PARTS = [
  ["train", "training"], ["wait", "waits for others"], ["meet", "connects"], ["encode", "encodes, adds up"],
  ["send", "sends, receives"], ["outer", "outer step"], ["agree", "waits for the commit"],
];

// What an island did around the commit of a round: [part, from, to], in seconds since 1970.
function boxes(round, track) {
  const found = [];
  const add = (part, from, to) => { if (to > from) found.push([part, from, to]); };
  if (track.offered_s !== undefined) {
    const offered = round.at - track.offered_s;
    add("train", offered - track.train_s, offered);
    add("wait", offered, round.at - round.sync_s);
  }
  if (track.reached_s !== undefined) {
    const reached = round.at - track.reached_s;
    const began = reached - track.wire_s;
    const outer = reached - track.outer_s;
    const sends = Math.max(began + track.meet_s, outer - track.send_s);
    add("meet", began, began + track.meet_s);
    add("encode", began + track.meet_s, sends);
    add("send", sends, outer);
    add("outer", outer, reached);
    add("agree", reached, round.at);
  }
  return found;
}

function Lane({ name, found, from, to }) {
  const box = ([part, start, stop]) => {
    const left = Math.max(start, from);
    const right = Math.min(stop, to);
    if (right <= left) return null;
    const style = { left: `${(100 * (left - from)) / (to - from)}%`, width: `${(100 * (right - left)) / (to - from)}%` };
    const title = `${name}: ${PARTS.find(([key]) => key === part)[1]}, ${duration(stop - start)}`;
    return html`<i class="box ${part}" style=${style} title=${title}></i>`;
  };
  return html`<div class="lane"><span class="who" title=${name}>${name}</span><div class="track">${found.map(box)}</div></div>`;
}

export function Timeline({ rounds, names }) {
  const [close, setClose] = useState(false);
  const known = rounds.filter((round) => round.at && Object.keys(round.islands).length);
  const last = known.slice(close ? -1 : -6);
  if (!last.length) {
    return html`<section class="card" id="timeline"><h2>Last rounds</h2><p class="empty">Nothing is committed yet.</p></section>`;
  }
  const every = [...new Set(last.flatMap((round) => Object.keys(round.islands)))].sort((a, b) => a - b);
  const seats = every.slice(0, MOST_LANES);
  const lanes = seats.map((seat) => [
    `${seat} ${names[seat] || ""}`,
    last.flatMap((round) => (round.islands[seat] ? boxes(round, round.islands[seat]) : [])),
  ]);
  const all = lanes.flatMap(([, found]) => found);
  const to = last[last.length - 1].at;
  const syncs = all.filter(([part]) => part !== "train").map(([, start]) => start);
  const from = close && syncs.length ? Math.min(...syncs) - 0.05 * (to - Math.min(...syncs)) : Math.min(...all.map(([, start]) => start));
  const at = (time) => ({ left: `${(100 * (time - from)) / (to - from)}%` });
  const marks = last.filter((round) => round.at > from);
  return html`<section class="card" id="timeline">
    <h2>${close ? `The sync of round ${last[0].round}` : "Last rounds"}
      <button class="plain" onClick=${() => setClose(!close)}>${close ? "show rounds" : "look closer at the last sync"}</button></h2>
    <div class="lanes">
      ${lanes.map(([name, found]) => html`<${Lane} key=${name} name=${name} found=${found} from=${from} to=${to} />`)}
      <div class="lane marks"><span class="who"></span><div class="track">
        ${marks.map((round) => html`<b class="mark" style=${at(round.at)}><u>${round.round}</u></b>`)}</div></div>
    </div>
    <p class="legend">${PARTS.map(([part, text]) => html`<span><i class="key ${part}"></i>${text}</span>`)}
      <span>blank: lands the round, evaluates, saves</span>
      <span class="span">${every.length > seats.length ? `${every.length - seats.length} more islands, ` : ""}${duration(to - from)} in all</span></p>
  </section>`;
}
