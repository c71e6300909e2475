// The server at work: draws what /live reports as meters and a map of the experts. Nothing is asked for while nobody can see it.

import { call, events, keyed } from './api.js';
import { HeatMap } from './heatmap.js';

/** Seconds that the small curves show. */
const SPAN = 60;
/** Seconds that the figures are means of. */
const WINDOW = 2;

export class Machine {
  /** What the server has loaded, from the event `machine`. */
  model = null;
  /** Told when the connection broke. */
  onlost = () => {};

  #root;
  #map;
  #frames = [];
  #curves = new Map();
  #watching = null;
  #wanted = false;
  #served = false;

  constructor(root) {
    this.#root = root;
    const canvas = root.querySelector('canvas');
    this.#map = new HeatMap(canvas);
    const spot = this.#part('spot');
    canvas.addEventListener('pointermove', (event) => {
      spot.textContent = this.#map.describe(event.offsetX, event.offsetY);
    });
    canvas.addEventListener('pointerleave', () => {
      spot.textContent = '';
    });
    document.addEventListener('visibilitychange', () => this.#decide());
    keyed.addEventListener('change', () => {
      this.#stop();
      this.#decide();
    });
  }

  /** Whether somebody looks at the panel. */
  watch(wanted) {
    this.#wanted = wanted;
    this.#decide();
  }

  /** Whether the server answers, and what to say if not. */
  serve(served, reason) {
    this.#served = served;
    if (!served) this.#say(reason);
    this.#decide();
  }

  #decide() {
    const needed = this.#wanted && this.#served && !document.hidden;
    if (!needed) this.#stop();
    else if (!this.#watching) this.#run();
  }

  #stop() {
    this.#watching?.abort();
    this.#watching = null;
  }

  async #run() {
    const watching = new AbortController();
    this.#watching = watching;
    for (let pause = 1; !watching.signal.aborted; pause = Math.min(2 * pause, 15)) {
      try {
        const response = await call('/live', { signal: watching.signal });
        for await (const { name, data } of events(response)) {
          if (name === 'machine') this.#meet(JSON.parse(data));
          if (name === 'frame') this.#show(JSON.parse(data));
          pause = 1;
        }
        this.#say('The connection was lost. Reconnecting…');
      } catch (failure) {
        if (watching.signal.aborted) return;
        this.#say(`${failure.message} Reconnecting…`);
      }
      this.onlost();
      await new Promise((resolve) => setTimeout(resolve, pause * 1000));
    }
  }

  #say(words) {
    this.#part('state').textContent = words;
    this.#root.dataset.live = words === '';
  }

  #part(name) {
    return this.#root.querySelector(`[data-part="${name}"]`);
  }

  #put(name, text) {
    const part = this.#part(name);
    if (part.textContent !== text) part.textContent = text;
  }

  #meet(model) {
    this.model = model;
    this.#frames = [];
    this.#map.shape(model.layers);
    const [experts, used] = [most(model.layers, 1), most(model.layers, 2)];
    // A model without experts has only the other meters.
    for (const part of ['experts', 'hit', 'drive', 'memory-legend']) this.#part(part).hidden = model.layers.length === 0;
    this.#put('shape', `${model.layers.length} layers × ${experts} experts; each token uses ${used} per layer`);
    this.#part('pcie').hidden = !model.gpu || model.layers.length === 0;
    const threads = model.threads && `${model.threads} threads`;
    const vram = model.gpu && `${size(model.gpu.planned)} of GPU memory`;
    this.#put('about', [model.compute, vram, threads, model.io?.split(',')[0]].filter(Boolean).join(' · '));
    this.#put('verdict', model.verdict ?? '');
  }

  #show(frame) {
    this.#say('');
    this.#map.apply(Uint8Array.from(atob(frame.changes), (char) => char.charCodeAt(0)));
    this.#frames.push(frame);
    while (frame.at - this.#frames[0].at > SPAN * 1000) this.#frames.shift();

    this.#meter('writing', 'tokens', (n) => n.toFixed(n < 100 ? 1 : 0));
    this.#meter('reading', 'prompt_tokens', (n) => n.toFixed(n < 100 ? 1 : 0));
    this.#meter('drive', 'read', (n) => (n / 1e9).toFixed(2));
    if (this.model.gpu) this.#meter('pcie', 'uploaded', (n) => (n / 1e9).toFixed(2));
    this.#hits();
    this.#memory(frame);
    this.#put('requests', requests(frame));
    if (this.#map.count > 0) this.#counts();
  }

  /** A rate: its mean over the last seconds, and its course. */
  #meter(name, field, format) {
    const rate = (from, to) => (to.at > from.at ? ((to[field] - from[field]) * 1000) / (to.at - from.at) : 0);
    this.#put(`${name}-now`, format(rate(this.#since(WINDOW), this.#frames.at(-1))));
    this.#curve(name, this.#course(rate));
  }

  #hits() {
    const rate = (from, to) => {
      const all = to.hits + to.misses - from.hits - from.misses;
      return all > 0 ? (to.hits - from.hits) / all : null;
    };
    const now = rate(this.#since(WINDOW), this.#frames.at(-1)) ?? this.#course(rate).findLast((r) => r !== null);
    this.#put('hit-now', now === undefined ? '–' : (100 * now).toFixed(now < 0.9995 ? 1 : 0));
    const [from, to] = [this.#since(WINDOW), this.#frames.at(-1)];
    const all = to.hits + to.misses - from.hits - from.misses;
    const there = all > 0 ? (to.device_hits - from.device_hits) / all : 0;
    this.#put('gpu-hit', this.model.gpu && all > 0 ? `, ${(100 * there).toFixed(0)} on the GPU` : '');
    this.#curve('hit', this.#course(rate), 1);
  }

  /** The first frame of the last seconds. */
  #since(seconds) {
    const last = this.#frames.at(-1).at;
    return this.#frames.find((frame) => last - frame.at <= seconds * 1000);
  }

  /** A figure for each second that is kept. */
  #course(figure) {
    const course = [];
    let from = this.#frames[0];
    for (const frame of this.#frames) {
      if (frame.at - from.at >= 950) {
        course.push(figure(from, frame));
        from = frame;
      }
    }
    return course;
  }

  #curve(name, course, most = Math.max(...course, 0)) {
    let path = this.#curves.get(name);
    if (!path) {
      path = this.#part(name).querySelector('path');
      this.#curves.set(name, path);
    }
    // The view is SPAN wide and 20 high; the latest second is at its right end.
    let drawn = '';
    let pen = 'M';
    for (const [i, value] of course.entries()) {
      if (value === null) {
        pen = 'M';
        continue;
      }
      drawn += `${pen}${SPAN - course.length + i + 1} ${(19 - 18 * (most > 0 ? value / most : 0)).toFixed(1)}`;
      pen = 'L';
    }
    path.setAttribute('d', drawn);
  }

  #memory(frame) {
    const { dense, budget } = this.model.memory;
    const whole = budget ?? Math.max(frame.resident ?? 0, dense + frame.slots);
    const used = frame.resident ?? dense + frame.slots;
    // Slots are taken from the system as they are first used.
    const experts = Math.min(frame.slots, Math.max(used - dense, 0));
    const shares = { dense: Math.min(dense, used), experts, other: Math.max(used - dense - experts, 0) };
    for (const [name, bytes] of Object.entries(shares)) {
      this.#part(`memory-${name}`).style.width = `${Math.min(100, (100 * bytes) / whole).toFixed(2)}%`;
    }
    this.#put('memory-now', budget ? `${size(used)} of ${size(budget)}` : size(used));
    const words = `${size(shares.dense)} dense weights, ${size(experts)} experts, ${size(shares.other)} other`;
    this.#part('memory-bar').ariaLabel = words;
    this.#part('memory-bar').title = words;
  }

  #counts() {
    const { count, resident, uploaded } = this.#map;
    const gpu = uploaded > 0 ? `, ${uploaded.toLocaleString('en')} of them on the GPU` : '';
    const words = `${resident.toLocaleString('en')} of ${count.toLocaleString('en')} experts in memory${gpu}`;
    this.#part('device-legend').hidden = uploaded === 0;
    this.#put('resident', words);
    this.#root.querySelector('canvas').ariaLabel = `Map of the experts: ${words}`;
  }
}

const most = (layers, at) => layers.reduce((max, layer) => Math.max(max, layer[at]), 0);

function requests({ running, waiting }) {
  if (running + waiting === 0) return 'Idle';
  return `${running} running${waiting > 0 ? `, ${waiting} waiting` : ''}`;
}

/** Bytes, as people say them. */
export function size(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1024;
    unit++;
  }
  return `${bytes < 10 && unit > 0 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
