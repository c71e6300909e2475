// One conversation on the screen: its messages, and the answers that are being written.

import { Failure, call, events, sentence } from './api.js';
import { Markdown } from './markdown.js';

/** Drawing may take this share of the time while an answer comes. */
const DRAWING = 0.2;
const SAVE_EVERY = 2000;

export class Chat {
  /** The conversation on the screen. */
  conversation = null;
  /** Told when a conversation has changed and should be kept. */
  onchange = () => {};
  /** Told when the server wants a key. */
  onkey = () => {};
  /** Told when a user's message is to be edited: its index. */
  onedit = () => {};

  #messages;
  #scroll;
  #welcome;
  /** Answers being written, by conversation. */
  #runs = new Map();
  #follow = true;

  constructor({ messages, scroll, welcome }) {
    this.#messages = messages;
    this.#scroll = scroll;
    this.#welcome = welcome;
    messages.addEventListener('click', (event) => this.#click(event));
    scroll.addEventListener('scroll', () => {
      this.#follow = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
    });
  }

  /** Whether an answer is being written to a conversation. */
  busy(id = this.conversation.id) {
    return this.#runs.has(id);
  }

  show(conversation) {
    this.conversation = conversation;
    this.#follow = true;
    this.#draw();
    this.#scroll.scrollTop = this.#scroll.scrollHeight;
  }

  /** Sends a message, in place of an earlier one and all after it if `instead` is its index. */
  send(text, instead = this.conversation.messages.length) {
    this.conversation.messages.splice(instead, Infinity, { role: 'user', content: text });
    this.#follow = true;
    this.#answer();
  }

  /** Answers the last message of the user once more. */
  regenerate() {
    const { messages } = this.conversation;
    if (this.busy() || messages.length === 0) return;
    while (messages.at(-1)?.role === 'assistant') messages.pop();
    this.#answer();
  }

  stop(id = this.conversation.id) {
    this.#runs.get(id)?.abort.abort();
  }

  #draw() {
    const { messages, id } = this.conversation;
    const run = this.#runs.get(id);
    this.#welcome.hidden = messages.length > 0;
    this.#messages.replaceChildren();
    for (const [index, message] of messages.entries()) {
      if (message.role === 'user') {
        this.#messages.append(userView(message, index));
      } else {
        const view = new AnswerView(message, run?.message === message);
        if (run?.message === message) run.view = view;
        this.#messages.append(view.node);
      }
    }
    this.#mark();
  }

  /** Only the last answer can be written anew. */
  #mark() {
    const last = this.#messages.lastElementChild;
    for (const button of this.#messages.querySelectorAll('[data-do="again"]')) {
      button.hidden = button.closest('article') !== last;
    }
  }

  #click(event) {
    const button = event.target.closest('button');
    if (!button) return;
    const article = button.closest('article');
    const index = [...this.#messages.children].indexOf(article);
    if (button.dataset.action === 'copy-code') {
      copy(button, button.closest('.code').querySelector('code').textContent);
    } else if (button.dataset.do === 'copy') {
      copy(button, this.conversation.messages[index].content);
    } else if (button.dataset.do === 'edit') {
      this.onedit(index);
    } else if (button.dataset.do === 'again') {
      this.regenerate();
    }
  }

  async #answer() {
    const conversation = this.conversation;
    const message = { role: 'assistant', content: '', reasoning: '' };
    const body = request(conversation);
    const run = { message, abort: new AbortController(), view: null, drawing: 0, saved: performance.now() };
    conversation.messages.push(message);
    conversation.updated = Date.now();
    this.#runs.set(conversation.id, run);
    this.#draw();
    this.#stay();
    this.onchange(conversation);
    try {
      await this.#stream(conversation, run, body);
    } catch (failure) {
      message.error = describe(failure, run);
      if (failure.status === 401) this.onkey();
    }
    clearTimeout(run.drawing);
    this.#runs.delete(conversation.id);
    run.view?.finish();
    this.#stay();
    this.onchange(conversation);
  }

  async #stream(conversation, run, body) {
    const { message } = run;
    const response = await call('/v1/chat/completions', { body, signal: run.abort.signal });
    let ended = false;
    for await (const { data } of events(response)) {
      if (data === '[DONE]') {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(sentence(chunk.error), { advice: 'What was written so far is kept.' });
      if (chunk.prompt_progress) run.view?.progress(chunk.prompt_progress);
      if (chunk.usage || chunk.timings || chunk.experts) {
        message.stats = stats(chunk, message.stats);
      }
      const choice = chunk.choices?.[0];
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (!content && !reasoning) continue;
      const now = performance.now();
      if (reasoning) {
        message.reasoning += reasoning;
        run.thinking ??= now;
      }
      if (content) {
        message.content += content;
        if (run.thinking && message.thought === undefined) message.thought = now - run.thinking;
      }
      this.#later(conversation, run);
    }
    if (!ended) {
      throw new Failure('The connection ended before the answer did.', { advice: 'What was written so far is kept. Try again.' });
    }
  }

  /** Draws what has come, soon: often, but not so often that drawing takes most of the time. */
  #later(conversation, run) {
    if (run.drawing) return;
    run.drawing = setTimeout(() => {
      const start = performance.now();
      run.drawing = 0;
      run.view?.update();
      this.#stay();
      const end = performance.now();
      run.pause = (end - start) / DRAWING;
      if (end - run.saved > SAVE_EVERY) {
        run.saved = end;
        this.onchange(conversation);
      }
    }, Math.max(16, run.pause ?? 0));
  }

  /** Stays at the end for those who are there. */
  #stay() {
    if (this.#follow) this.#scroll.scrollTop = this.#scroll.scrollHeight;
  }
}

/** What is asked of the server. */
function request({ messages, settings }) {
  // A question that got no answer is left out with it: templates want the two to alternate.
  const failed = (message) => message?.role === 'assistant' && message.content === '';
  const said = messages.filter((message, i) => !failed(message) && !(message.role === 'user' && failed(messages[i + 1])))
    .map(({ role, content }) => ({ role, content }));
  if (settings.system) said.unshift({ role: 'system', content: settings.system });
  const body = { messages: said, stream: true, stream_options: { include_usage: true }, return_progress: true };
  for (const name of ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed']) {
    if (typeof settings[name] === 'number') body[name] = settings[name];
  }
  if (settings.think) {
    const think = settings.think === 'on';
    // Templates know it by either name.
    body.chat_template_kwargs = { enable_thinking: think, thinking: think };
  }
  return body;
}

/** What the server measured of an answer, from the chunks that tell. */
function stats({ usage, timings, experts }, known = {}) {
  return {
    tokens: usage?.completion_tokens ?? timings?.predicted_n ?? known.tokens,
    prompt: usage?.prompt_tokens ?? known.prompt,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n ?? known.cached,
    speed: timings?.predicted_per_second ?? known.speed,
    prompt_ms: timings?.prompt_ms ?? known.prompt_ms,
    hit_rate: experts?.hit_rate ?? known.hit_rate,
    read: experts?.bytes_read ?? known.read,
  };
}

function describe(failure, run) {
  if (run.abort.signal.aborted) return { stopped: true };
  if (failure instanceof Failure) return { message: failure.message, advice: failure.advice };
  return { message: 'The connection broke before the answer ended.', advice: 'What was written so far is kept. Try again.' };
}

function userView(message, index) {
  const text = el('div', message.content);
  text.className = 'said';
  const node = el('article', unseen('You said:'), text, actions(['edit', 'Edit and send again'], ['copy', 'Copy']));
  node.className = 'user';
  node.dataset.index = index;
  return node;
}

/** An answer: its reasoning, its text, and what is known of how it was made. */
class AnswerView {
  node = el('article');
  #message;
  #text = el('div');
  #markdown = new Markdown(this.#text);
  #reasoning = el('details');
  #thoughts = el('div');
  #summary = el('summary', 'Thinking …');
  #status = el('div');
  #shown = { content: 0, reasoning: 0 };

  constructor(message, running) {
    this.#message = message;
    this.node.className = 'answer';
    this.#text.className = 'prose';
    this.#thoughts.className = 'thoughts';
    this.#reasoning.append(this.#summary, this.#thoughts);
    this.#reasoning.hidden = true;
    this.#status.className = 'status';
    this.#status.role = 'status';
    this.node.append(unseen('The model answered:'), this.#reasoning, this.#text, this.#status);
    this.node.ariaBusy = running;
    this.update();
    if (!running) this.finish();
    else if (message.content === '' && message.reasoning === '') this.#status.append(waiting('Sending …'));
  }

  progress({ processed: done = 0, total = 0 }) {
    const bar = el('progress');
    bar.max = total;
    bar.value = done;
    bar.ariaLabel = 'Reading the prompt';
    this.#status.replaceChildren(el('span', `Reading the prompt: ${done.toLocaleString('en')} of ${total.toLocaleString('en')} tokens`), bar);
  }

  /** Shows what has come since. */
  update() {
    const { content, reasoning } = this.#message;
    if (reasoning.length > this.#shown.reasoning) {
      this.#reasoning.hidden = false;
      this.#thoughts.append(reasoning.slice(this.#shown.reasoning));
      this.#shown.reasoning = reasoning.length;
      this.#status.replaceChildren();
    }
    if (content.length > this.#shown.content) {
      this.#markdown.push(content.slice(this.#shown.content));
      this.#shown.content = content.length;
      this.#status.replaceChildren();
      this.#thought();
    }
  }

  #thought() {
    const { thought, reasoning } = this.#message;
    if (reasoning) this.#summary.textContent = thought ? `Thought for ${(thought / 1000).toFixed(1)} s` : 'Thoughts';
  }

  finish() {
    const message = this.#message;
    this.update();
    this.#markdown.finish();
    this.#thought();
    this.node.ariaBusy = false;
    this.#status.remove();
    const { error } = message;
    if (error?.message) {
      const notice = el('p', el('b', error.message), ' ', error.advice);
      notice.className = 'notice error';
      notice.role = 'alert';
      this.node.append(notice);
    }
    const words = [error?.stopped && 'stopped', message.finish === 'length' && 'cut off at its limit of tokens', ...measured(message.stats)];
    const figures = el('span', words.filter(Boolean).join(' · '));
    figures.className = 'dim';
    this.node.append(el('footer', figures, actions(['again', 'Answer again'], ['copy', 'Copy'])));
  }
}

function measured(stats) {
  if (!stats) return [];
  const read = stats.prompt !== undefined && stats.prompt_ms !== undefined
    && `prompt of ${stats.prompt} in ${(stats.prompt_ms / 1000).toFixed(1)} s${stats.cached ? ` (${stats.cached} known)` : ''}`;
  return [
    stats.speed > 0 && `${stats.speed.toFixed(1)} tok/s`,
    stats.tokens !== undefined && `${stats.tokens} tokens`,
    read,
    typeof stats.hit_rate === 'number' && `experts ${(100 * stats.hit_rate).toFixed(0)}% hit`,
  ];
}

function waiting(words) {
  const node = el('span', words);
  node.className = 'waiting';
  return node;
}

function actions(...wanted) {
  const node = el('div');
  node.className = 'actions';
  for (const [name, label] of wanted) {
    const button = el('button', icon(name));
    button.type = 'button';
    button.className = 'icon small';
    button.dataset.do = name;
    button.ariaLabel = label;
    button.title = label;
    node.append(button);
  }
  return node;
}

async function copy(button, text) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    // Pages that came over plain HTTP from another machine have no clipboard; this older way may be left.
    const field = el('textarea');
    field.value = text;
    field.className = 'unseen';
    document.body.append(field);
    field.select();
    done = document.execCommand('copy');
    field.remove();
    button.focus();
  }
  button.dataset.done = done ? 'Copied' : 'Not copied';
  setTimeout(() => delete button.dataset.done, 1500);
}

export function icon(name) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const use = document.createElementNS('http://www.w3.org/2000/svg', 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.append(use);
  svg.setAttribute('aria-hidden', 'true');
  return svg;
}

export function el(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}

function unseen(words) {
  const node = el('span', words);
  node.className = 'unseen';
  return node;
}
