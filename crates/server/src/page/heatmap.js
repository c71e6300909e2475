// Layers × experts on a canvas: one cell for each expert, folded so that any model fits the width.

/** Levels of a flash that fades. */
const LEVELS = 16;
/** Beside the cells, for the numbers of layers, in CSS pixels. */
const GUTTER = 26;
/** The largest cell, and one that is easily seen. */
const LARGEST = 24;
const CLEAR = 3;
const FADE_MS = 60;

const ABSENT = 0;
const ARRIVING = 1;
const PLACES = ['on the drive', 'being read', 'in memory', 'on the GPU'];

export class HeatMap {
  #canvas;
  #context;
  /** [layer, experts, used] of each layer that has experts. */
  #layers = [];
  /** Where each layer's experts begin among all. */
  #starts = [0];
  /** By expert: where it is, how bright its flash is, and whether that is for a miss. */
  #place = new Uint8Array(0);
  #flash = new Uint8Array(0);
  #missed = new Uint8Array(0);
  #grid = null;
  #pixels = null;
  #palette = null;
  #timer = 0;
  #calm = matchMedia('(prefers-reduced-motion: reduce)');

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext('2d', { alpha: true });
    new ResizeObserver(() => this.#layout()).observe(canvas.parentElement);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.#layout());
  }

  /** The model's layers; nothing is known of their experts yet. */
  shape(layers) {
    this.#layers = layers;
    this.#starts = [0];
    for (const [, experts] of layers) this.#starts.push(this.#starts.at(-1) + experts);
    const count = this.#starts.at(-1);
    this.#place = new Uint8Array(count);
    this.#flash = new Uint8Array(count);
    this.#missed = new Uint8Array(count);
    this.#layout();
  }

  get count() {
    return this.#place.length;
  }

  /** Experts in memory, the computer's or the GPU's. */
  get resident() {
    let sum = 0;
    for (const place of this.#place) sum += place >= 2 ? 1 : 0;
    return sum;
  }

  /** Experts on the GPU, which are among those. */
  get uploaded() {
    let sum = 0;
    for (const place of this.#place) sum += place === 3 ? 1 : 0;
    return sum;
  }

  /** What changed since the last frame: how many experts to pass over, then the code of the next, and so on. */
  apply(bytes) {
    let expert = 0;
    for (let i = 0; i < bytes.length; i++) {
      if (bytes[i] === 255) {
        expert += 255;
        continue;
      }
      expert += bytes[i];
      const code = bytes[++i];
      if (expert >= this.#place.length) return;
      this.#place[expert] = code & 3;
      const asked = code >> 2;
      if (asked > 0) {
        this.#flash[expert] = LEVELS - 1;
        // Where it was both, what it is now counts: a miss that was followed by hits, or the other way.
        this.#missed[expert] = asked === 2 || (asked === 3 && this.#place[expert] < 2) ? 1 : 0;
      } else if (this.#calm.matches) {
        this.#flash[expert] = 0;
      }
      this.#paint(expert);
      expert++;
    }
    this.#show();
    this.#fade();
  }

  /** What is under a place on the canvas, in words. */
  describe(x, y) {
    const grid = this.#grid;
    if (!grid) return '';
    const column = Math.floor((x * grid.scale - grid.left) / grid.width);
    let row = y * grid.scale;
    const layer = Math.floor(row / grid.band);
    row = Math.floor((row - layer * grid.band) / grid.height);
    if (column < 0 || column >= grid.columns || layer < 0 || layer >= this.#layers.length || row >= grid.fold) return '';
    const [number, experts] = this.#layers[layer];
    const expert = row * grid.columns + column;
    if (expert >= experts) return '';
    return `Layer ${number}, expert ${expert}: ${PLACES[this.#place[this.#starts[layer] + expert]]}`;
  }

  /** Lays the cells out for the width there is, and draws everything anew. */
  #layout() {
    const box = this.#canvas.parentElement.clientWidth;
    const layers = this.#layers.length;
    if (layers === 0 || box === 0) return;
    const scale = Math.min(Math.max(devicePixelRatio, 1), 3);
    const left = Math.round(GUTTER * scale);
    const widest = Math.max(...this.#layers.map(([, experts]) => experts));
    const fit = (tallest) => fold({ layers, widest, scale, width: Math.floor(box * scale) - left, height: tallest * scale });
    let grid = fit(Math.min(Math.max(innerHeight - 470, 340), 640));
    // Where cells would be too small to see, the panel is scrolled.
    if (grid.worth < 2 * scale) grid = fit(720);
    grid.band = grid.height * grid.fold + grid.between;
    this.#grid = { ...grid, scale, left };
    const canvas = this.#canvas;
    canvas.width = left + grid.columns * grid.width;
    canvas.height = grid.band * layers;
    canvas.style.width = `${canvas.width / scale}px`;
    canvas.style.height = `${canvas.height / scale}px`;
    this.#pixels = this.#context.createImageData(canvas.width - left, canvas.height);
    this.#mix();
    this.#label();
    for (let expert = 0; expert < this.#place.length; expert++) this.#paint(expert);
    this.#show();
  }

  /** The numbers of some layers beside them. */
  #label() {
    const { scale, left, band } = this.#grid;
    const context = this.#context;
    context.font = `${Math.round(9.5 * scale)}px ui-monospace, monospace`;
    context.fillStyle = getComputedStyle(this.#canvas).color;
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    const every = [1, 2, 5, 10, 20, 50, 100].find((step) => step * band >= 18 * scale) ?? 200;
    for (let layer = 0; layer < this.#layers.length; layer += every) {
      const y = Math.max(layer * band + band / 2, 5 * scale);
      context.fillText(String(this.#layers[layer][0]), left - 6 * scale, y);
    }
  }

  /** Colours of every place, with every level of either flash. */
  #mix() {
    const style = getComputedStyle(this.#canvas);
    const colour = (name) => {
      const hex = style.getPropertyValue(name).trim();
      return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    };
    const places = ['--absent', '--arriving', '--resident', '--device'].map(colour);
    const flashes = ['--hit', '--missed'].map(colour);
    this.#palette = new Uint32Array(PLACES.length * 2 * LEVELS);
    for (const [p, place] of places.entries()) {
      for (const [f, flash] of flashes.entries()) {
        for (let level = 0; level < LEVELS; level++) {
          // An expert that is on its way looks so, whatever it was asked for.
          const share = p === ARRIVING ? 0 : (level / (LEVELS - 1)) ** (p === ABSENT ? 1.4 : 0.8);
          const [r, g, b] = place.map((from, i) => Math.round(from + (flash[i] - from) * share));
          // Little-endian, as every machine is that a browser runs on.
          this.#palette[(p * 2 + f) * LEVELS + level] = 0xff000000 | (b << 16) | (g << 8) | r;
        }
      }
    }
  }

  #paint(expert) {
    const grid = this.#grid;
    if (!grid) return;
    // Layers mostly have equally many experts; the guess is right then.
    let layer = Math.min(Math.floor(expert / this.#layers[0][1]), this.#layers.length - 1);
    while (this.#starts[layer] > expert) layer--;
    while (this.#starts[layer + 1] <= expert) layer++;
    const index = expert - this.#starts[layer];
    const x = (index % grid.columns) * grid.width;
    const y = layer * grid.band + Math.floor(index / grid.columns) * grid.height;
    const colour = this.#palette[(this.#place[expert] * 2 + this.#missed[expert]) * LEVELS + this.#flash[expert]];
    const words = new Uint32Array(this.#pixels.data.buffer);
    const line = this.#pixels.width;
    for (let row = y; row < y + grid.height - grid.gap[1]; row++) {
      words.fill(colour, row * line + x, row * line + x + grid.width - grid.gap[0]);
    }
  }

  #show() {
    if (this.#pixels) this.#context.putImageData(this.#pixels, this.#grid.left, 0);
  }

  /** Lets flashes fade, as long as there are any. */
  #fade() {
    if (this.#timer || this.#calm.matches) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      let some = false;
      for (let expert = 0; expert < this.#flash.length; expert++) {
        if (this.#flash[expert] > 0) {
          this.#flash[expert]--;
          this.#paint(expert);
          some = true;
        }
      }
      if (some) {
        this.#show();
        this.#fade();
      }
    }, FADE_MS);
  }
}

/**
 * Cuts layers into lines. The fewest that give cells which are easily seen, or else those that give the largest.
 * Lengths are in pixels of the device, so that all cells are alike.
 */
function fold({ layers, widest, scale, width, height }) {
  let best = null;
  for (let lines = 1; lines <= widest; lines++) {
    const columns = Math.ceil(widest / lines);
    const between = lines > 1 ? Math.round(scale) : 0;
    const wide = Math.min(Math.floor(width / columns), Math.round(LARGEST * scale));
    if (wide < 1) continue;
    const tall = Math.floor((height / layers - between) / lines);
    if (tall < 1 && best) break;
    const grid = { fold: lines, columns, between, width: wide, height: Math.max(1, Math.min(tall, Math.max(wide, 8 * scale))) };
    const gap = Math.min(wide, grid.height) >= 6 * scale ? Math.round(2 * scale) : 0;
    // Lines that are not folded need no space between layers if it can be spared from the cells.
    grid.gap = [gap, gap || (lines === 1 && grid.height >= 3 * scale ? Math.round(scale) : 0)];
    grid.worth = Math.min(wide, 1.5 * grid.height);
    if (wide >= CLEAR * scale && grid.height >= 2 * scale) return grid;
    if (!best || grid.worth > best.worth) best = grid;
  }
  return best;
}
