// One conversation on the screen: its messages, and the answers that are being written.

import { Failure, TOO_LONG, call, events, sentence } from './api.js';
import { Markdown } from './markdown.js';

/** Drawing may take this share of the time while an answer comes. */
const DRAWING = 0.2;
const SAVE_EVERY = 2000;
/** What is kept of a conversation when its oldest turns are dropped. */
const KEPT = 0.5;

export class Chat {
  /** The conversation on the screen. */
  conversation = null;
  /** Told when a conversation has changed and should be kept. */
  onchange = () => {};
  /** Told when a user's message is to be edited: its index. */
  onedit = () => {};

  #server;
  #messages;
  #scroll;
  #welcome;
  /** Answers being written, by conversation. */
  #runs = new Map();
  #follow = true;

  constructor(server, { messages, scroll, welcome }) {
    this.#server = server;
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
    const { conversation } = this;
    conversation.messages.splice(instead, Infinity, { role: 'user', content: text });
    if (first(conversation) > instead) conversation.first = 0;
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

  /** Why the last message got no answer, if so. */
  get failure() {
    return this.conversation.messages.at(-1)?.error ?? null;
  }

  /** Tokens of the context that the conversation takes, as the server counted them last; 0 if that is not known. */
  get used() {
    const { messages } = this.conversation;
    const { stats } = messages.findLast((message) => message.stats) ?? {};
    return stats?.first === first(this.conversation) ? (stats.prompt ?? 0) + (stats.tokens ?? 0) : 0;
  }

  /** Whether there are turns that could be dropped: all before the last message of the user. */
  get canDrop() {
    const { messages } = this.conversation;
    return messages.findLastIndex(({ role }) => role === 'user') > first(this.conversation);
  }

  /** From now on the oldest turns are not sent any more, until half of the text is left. They stay on the screen. */
  drop() {
    const { conversation } = this;
    const { messages } = conversation;
    const length = (from) => messages.slice(from).reduce((sum, { content }) => sum + content.length, 0);
    const most = KEPT * length(first(conversation));
    const turns = [...messages.keys()].filter((i) => messages[i].role === 'user' && i > first(conversation));
    conversation.first = turns.find((i) => length(i) <= most) ?? turns.at(-1);
    this.#draw();
    this.onchange(conversation);
  }

  #draw() {
    const { messages, id } = this.conversation;
    const run = this.#runs.get(id);
    this.#welcome.hidden = messages.length > 0;
    this.#messages.replaceChildren();
    for (const [index, message] of messages.entries()) {
      if (index > 0 && index === first(this.conversation)) this.#messages.append(droppedView());
      if (message.role === 'user') {
        this.#messages.append(userView(message, index));
      } else {
        const view = new AnswerView(message, run?.message === message, this.canDrop);
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
    const index = [...this.#messages.querySelectorAll('article')].indexOf(article);
    if (button.dataset.action === 'copy-code') {
      copy(button, button.closest('.code').querySelector('code').textContent);
    } else if (button.dataset.do === 'copy') {
      copy(button, this.conversation.messages[index].content);
    } else if (button.dataset.do === 'edit') {
      this.onedit(index);
    } else if (button.dataset.do === 'again') {
      this.regenerate();
    } else if (button.dataset.do === 'edit-last') {
      this.onedit(this.conversation.messages.findLastIndex(({ role }) => role === 'user'));
    } else if (button.dataset.do === 'drop') {
      this.drop();
      this.regenerate();
    } else if (button.dataset.do === 'restore') {
      this.conversation.first = 0;
      this.#draw();
      this.onchange(this.conversation);
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
      await this.#ask(conversation, run, body);
    } catch (failure) {
      message.error = describe(failure, run);
      if (failure.status === 401) this.#server.lock();
      else if (!run.abort.signal.aborted) this.#server.check();
    }
    clearTimeout(run.drawing);
    this.#runs.delete(conversation.id);
    run.view?.finish();
    this.#stay();
    this.onchange(conversation);
  }

  /** Asks for the answer, and waits first if the model is being loaded. */
  async #ask(conversation, run, body) {
    const { signal } = run.abort;
    for (;;) {
      await this.#server.usable(signal, () => run.view?.wait('Waiting for the model to load…'));
      run.view?.wait('Sending…');
      try {
        const response = await call('/v1/chat/completions', { body, signal });
        run.view?.wait('Waiting for the model…');
        return await this.#stream(conversation, run, response);
      } catch (failure) {
        if (failure.code !== 'model_loading') throw failure;
        await this.#server.check();
      }
    }
  }

  async #stream(conversation, run, response) {
    const { message } = run;
    let ended = false;
    for await (const { data } of events(response)) {
      if (data === '[DONE]') {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(sentence(chunk.error), { code: chunk.error.code });
      if (chunk.prompt_progress) run.view?.progress(chunk.prompt_progress);
      if (chunk.usage || chunk.timings || chunk.experts) {
        message.stats = { ...stats(chunk, message.stats), first: first(conversation) };
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
      throw new Failure('The connection ended before the answer was complete.');
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

/** The index of the first message that is sent; those before it were dropped. */
const first = (conversation) => conversation.first ?? 0;

/** What is asked of the server. */
function request(conversation) {
  const { settings } = conversation;
  const messages = conversation.messages.slice(first(conversation));
  // A question without an answer is left out: templates expect that the user and the assistant take turns.
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
  const { message, status, code, advice } = failure instanceof Failure ? failure : new Failure('The connection to the server was lost.');
  const kept = run.message.content !== '' ? 'The text so far is kept.' : '';
  return { message, status, code, advice: [kept, advice].filter(Boolean).join(' ') };
}

function droppedView() {
  const node = el('p', 'The model no longer sees the turns above. ', button('restore', 'Send them again'));
  node.className = 'dropped dim';
  return node;
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
  #summary = el('summary', 'Reasoning…');
  #status = el('div');
  #shown = { content: 0, reasoning: 0 };
  #canDrop;

  constructor(message, running, canDrop) {
    this.#message = message;
    this.#canDrop = canDrop;
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
    else this.wait('Waiting for the model…');
  }

  /** Says what the answer waits for, until there is some of it. */
  wait(words) {
    const { content, reasoning } = this.#message;
    if (content === '' && reasoning === '') this.#status.replaceChildren(waiting(words));
  }

  /** Says how much of the prompt is processed, and how long the rest takes at the speed so far. */
  progress({ processed, total, seconds_left: left }) {
    const bar = el('progress');
    bar.max = total;
    bar.value = processed;
    bar.ariaLabel = 'Processing the prompt';
    const rest = left === null ? '' : `, ${duration(left)} left`;
    const words = `Processing the prompt: ${Math.floor((100 * processed) / total)}% of ${total.toLocaleString('en')} tokens${rest}`;
    this.#status.replaceChildren(el('span', words), bar);
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
    if (reasoning) this.#summary.textContent = thought ? `Reasoning, ${(thought / 1000).toFixed(1)} s` : 'Reasoning';
  }

  finish() {
    const message = this.#message;
    this.update();
    this.#markdown.finish();
    this.#thought();
    this.node.ariaBusy = false;
    this.#status.remove();
    const { error } = message;
    if (error?.message) this.node.append(this.#failure(error));
    const figures = el('span', [error?.stopped && 'stopped', message.finish === 'length' && 'cut off: the limit of tokens is reached', ...measured(message.stats)]
      .filter(Boolean).join(' · '));
    figures.className = 'dim';
    const deeds = error?.message ? [] : [['again', 'Answer again']];
    this.node.append(el('footer', figures, actions(...deeds, ['copy', 'Copy'])));
  }

  /** What went wrong, and what can be done about it. */
  #failure(error) {
    const long = TOO_LONG.includes(error.code);
    const advice = long && !this.#canDrop ? 'Shorten the message.' : error.advice;
    const words = el('p', el('b', error.message), ' ', advice ?? '');
    const deeds = el('div', button('again', 'Retry'), button('edit-last', 'Edit the message'));
    if (long && this.#canDrop) deeds.prepend(button('drop', 'Drop the oldest turns and retry'));
    deeds.className = 'deeds';
    const notice = el('div', words, deeds);
    notice.className = 'notice error';
    notice.role = 'alert';
    return notice;
  }
}

function measured(stats) {
  if (!stats) return [];
  const read = stats.prompt !== undefined && stats.prompt_ms !== undefined
    && `prompt: ${stats.prompt} tokens in ${(stats.prompt_ms / 1000).toFixed(1)} s${stats.cached ? ` (${stats.cached} cached)` : ''}`;
  return [
    stats.speed > 0 && `${stats.speed.toFixed(1)} tok/s`,
    stats.tokens !== undefined && `${stats.tokens} tokens`,
    read,
    typeof stats.hit_rate === 'number' && `expert cache hit rate ${(100 * stats.hit_rate).toFixed(0)}%`,
  ];
}

/** Seconds, as people say them. */
function duration(seconds) {
  if (seconds < 90) return `about ${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `about ${Math.round(seconds / 60)} min` : `about ${(seconds / 3600).toFixed(1)} h`;
}

function waiting(words) {
  const node = el('span', words);
  node.className = 'waiting';
  return node;
}

/** A button with words. */
function button(name, words) {
  const node = el('button', words);
  node.type = 'button';
  node.className = 'link';
  node.dataset.do = name;
  return node;
}

function actions(...wanted) {
  const node = el('div');
  node.className = 'actions';
  for (const [name, label] of wanted) {
    const deed = button(name, icon(name));
    deed.className = 'icon small';
    deed.ariaLabel = label;
    deed.title = label;
    node.append(deed);
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
