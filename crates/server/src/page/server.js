// The state of the server: reachable or not, loading or ready, open or locked by a key.

import { call, forgetKey, hasKey, keyed } from './api.js';

/** Milliseconds between two looks at the server: while all is well, and while something is awaited. */
const CALM = 5000;
const EAGER = 1000;
/** A server that takes longer to say how it is counts as gone. */
const PATIENCE = 5000;

/** Dispatches `change` whenever anything below has changed. */
export class Server extends EventTarget {
  /** connecting, loading, ready, failing, leaving, locked or gone. */
  state = 'connecting';
  /** How much of the model is loaded, from 0 to 1; null if that is not known. */
  loaded = null;
  /** Whether the key that was entered is wrong. */
  refused = false;
  /** The model's name and its context in tokens, once they are known. */
  model = '';
  context = 0;

  #timer = 0;
  #looking = null;

  constructor() {
    super();
    keyed.addEventListener('change', () => this.check());
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.check();
    });
  }

  /** Looks at the server now, and then again and again. Nothing is asked while the page is hidden. */
  check() {
    this.#looking ??= this.#look().finally(() => {
      this.#looking = null;
      clearTimeout(this.#timer);
      const pause = this.state === 'ready' ? CALM : EAGER;
      if (!document.hidden) this.#timer = setTimeout(() => this.check(), pause);
    });
    return this.#looking;
  }

  /** Waits while the model loads; `onwait` is called if there is something to wait for. */
  async usable(signal, onwait) {
    if (this.state === 'connecting') await this.check();
    if (this.state === 'loading') onwait();
    while (this.state === 'loading') {
      await new Promise((resolve, reject) => {
        this.addEventListener('change', resolve, { once: true });
        signal.addEventListener('abort', () => reject(signal.reason), { once: true });
      });
    }
  }

  /** The server has refused the key. */
  lock() {
    forgetKey();
    this.refused = true;
    this.state = 'locked';
    this.dispatchEvent(new Event('change'));
  }

  async #look() {
    const before = JSON.stringify(this);
    try {
      const response = await call('/health', { signal: AbortSignal.timeout(PATIENCE) });
      const { state, loaded = null, needs_key: needsKey } = await response.json();
      this.loaded = loaded;
      if (needsKey && !hasKey()) {
        this.state = 'locked';
      } else if (state === 'ready' && this.state !== 'ready') {
        await this.#meet();
      } else {
        this.state = state;
      }
    } catch (failure) {
      // An answer with an error is one, too.
      this.state = failure.status > 0 ? 'failing' : 'gone';
    }
    if (JSON.stringify(this) !== before) this.dispatchEvent(new Event('change'));
  }

  /** Learns what the server has loaded, which also tells whether it accepts the key. */
  async #meet() {
    try {
      const props = await (await call('/props')).json();
      this.model = props.model;
      this.context = props.n_ctx;
      this.refused = false;
      this.state = 'ready';
    } catch (failure) {
      if (failure.status !== 401) throw failure;
      this.lock();
    }
  }

  toJSON() {
    const { state, loaded, refused, model, context } = this;
    return { state, loaded, refused, model, context };
  }
}
