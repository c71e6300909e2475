// Talks to the server: requests with a key, server-sent events, and errors as sentences.

let key = null;
try {
  key = sessionStorage.getItem('forebay.key');
} catch {
  // Without storage the key lives as long as the page.
}

export const hasKey = () => key !== null;

/** Dispatches `change` when a key was entered. */
export const keyed = new EventTarget();

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem('forebay.key', value);
  } catch {
    // As above.
  }
  keyed.dispatchEvent(new Event('change'));
}

/** The server does not accept the key: another one has to be entered. */
export function forgetKey() {
  key = null;
  try {
    sessionStorage.removeItem('forebay.key');
  } catch {
    // As above.
  }
}

/** The codes of errors that say that a conversation is too long for the server. */
export const TOO_LONG = ['context_length_exceeded', 'insufficient_memory'];

/** What went wrong, in a sentence, and what to do about it. */
export class Failure extends Error {
  constructor(message, { status = 0, code = null, advice = '' } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.advice = advice;
  }
}

/** Asks the server; an answer that is an error becomes a Failure. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers['content-type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, { method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure('The server does not answer.', { advice: 'Check that forebay serve is running, then retry.' });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const { status } = response;
  let error = null;
  try {
    ({ error } = await response.json());
  } catch {
    // The answer of a proxy, for example. The status has to do.
  }
  const wait = Number(response.headers.get('retry-after'));
  const advice = {
    400: 'Check the settings of this conversation.',
    401: 'Enter an API key of this server.',
    403: 'Enter an API key of this server.',
    413: 'Send a shorter message.',
    429: wait > 0 ? `Retry in ${wait} second${wait === 1 ? '' : 's'}.` : 'Retry in a moment.',
    503: 'Retry in a moment.',
  }[status] ?? 'The server\'s log may say more.';
  const message = sentence(error) || `The server answered with status ${status}.`;
  const code = error?.code ?? null;
  return new Failure(message, { status, code, advice: TOO_LONG.includes(code) ? '' : advice });
}

/** The words of an error in OpenAI's shape, as a sentence. */
export function sentence(error) {
  const words = String(error?.message ?? error ?? '').trim();
  if (words === '') return '';
  return words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? '' : '.');
}

/** The server-sent events of an answer, each with its name and data. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  let name = 'message';
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (let line of lines) {
        line = line.replace(/\r$/, '');
        if (line === '') {
          if (data.length > 0) yield { name, data: data.join('\n') };
          [name, data] = ['message', []];
        } else if (line.startsWith('data:')) {
          data.push(line.slice(line[5] === ' ' ? 6 : 5));
        } else if (line.startsWith('event:')) {
          name = line.slice(6).trim();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
