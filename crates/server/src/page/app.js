// The page: puts the parts together, and keeps the list of conversations.

import { setKey } from './api.js';
import { Chat, el, icon } from './chat.js';
import { Machine } from './machine.js';
import { Server } from './server.js';
import * as store from './store.js';

const $ = (id) => document.getElementById(id);
const words = $('words');
const server = new Server();
const chat = new Chat(server, { messages: $('messages'), scroll: $('scroll'), welcome: $('welcome') });
const machine = new Machine($('machine'));
let conversations = [];
/** The index of the message that is being edited, and what was in the field before. */
let editing = null;
let draft = '';

// ---- conversations

function fresh() {
  const settings = store.preferences.get('settings', {});
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: '', created: Date.now(), updated: Date.now(), settings, messages: [] };
}

function show(conversation) {
  cancelEdit();
  chat.show(conversation);
  store.preferences.set('open', conversation.id);
  refresh();
}

const titleOf = ({ title, messages }) => title || messages[0]?.content.trim().split('\n')[0].slice(0, 80) || 'New conversation';

/** Shares of the context from which on the page warns, and says that it is full. */
const NEARLY = 0.8;
const FULL = 0.99;

/** Warns when the context fills, while turns can still be dropped. */
function contextNotice() {
  const [used, most] = [chat.used, server.context];
  const needed = most > 0 && used >= NEARLY * most && chat.canDrop && !chat.busy();
  $('context').hidden = !needed;
  if (!needed) return;
  const words = used >= FULL * most ? 'The context is full' : `The context is ${Math.floor((100 * used) / most)}% full`;
  $('context').firstElementChild.textContent = `${words}: ${used.toLocaleString('en')} of ${most.toLocaleString('en')} tokens.`;
}

/** What the page says about the conversation on the screen, and the list. */
function refresh() {
  const current = chat.conversation;
  $('title').textContent = titleOf(current);
  document.title = current.messages.length > 0 ? `${titleOf(current)} · Forebay` : 'Forebay';
  $('chosen').textContent = summary(current.settings);
  const busy = chat.busy();
  $('stop').hidden = !busy;
  $('send').hidden = busy;
  $('send').disabled = words.value.trim() === '';
  contextNotice();
  list();
}

function list() {
  const focused = document.activeElement?.closest('#list li')?.dataset.id;
  const part = document.activeElement?.dataset.row;
  // A name that is being written is not taken away.
  if ($('list').querySelector('input')) return;
  $('list').replaceChildren(...conversations.map(row));
  if (focused) $('list').querySelector(`li[data-id="${CSS.escape(focused)}"] [data-row="${part}"]`)?.focus();
}

function row(conversation) {
  const open = el('button', titleOf(conversation));
  open.type = 'button';
  open.className = 'open';
  open.title = titleOf(conversation);
  const item = el('li', open);
  item.dataset.id = conversation.id;
  open.dataset.row = 'open';
  if (conversation.id === chat.conversation.id) open.ariaCurrent = 'true';
  if (chat.busy(conversation.id)) item.className = 'busy';
  for (const [name, shape, label] of [['rename', 'edit', 'Rename'], ['export', 'export', 'Export as JSON'], ['delete', 'bin', 'Delete']]) {
    const button = el('button', icon(shape));
    button.type = 'button';
    button.className = 'icon small';
    button.dataset.row = name;
    button.title = label;
    button.ariaLabel = `${label}: ${titleOf(conversation)}`;
    item.append(button);
  }
  return item;
}

$('list').addEventListener('click', (event) => {
  const name = event.target.closest('button')?.dataset.row;
  const item = event.target.closest('li');
  const conversation = conversations.find(({ id }) => id === item?.dataset.id);
  if (!name || !conversation) return;
  if (name === 'open') {
    show(conversation);
    drawer('conversations', false);
  } else if (name === 'rename') {
    rename(item, conversation);
  } else if (name === 'export') {
    download(conversation);
  } else {
    discard(conversation);
  }
});

function rename(item, conversation) {
  const field = el('input');
  field.value = titleOf(conversation);
  field.ariaLabel = 'Name of the conversation';
  let done = false;
  const end = (keep) => {
    if (done) return;
    done = true;
    if (keep && field.value.trim()) {
      conversation.title = field.value.trim();
      keepIt(conversation);
    }
    field.remove();
    refresh();
    $('list').querySelector(`li[data-id="${CSS.escape(conversation.id)}"] [data-row="open"]`)?.focus();
  };
  field.addEventListener('keydown', (event) => {
    if (event.key === 'Enter') end(true);
    if (event.key === 'Escape') end(false);
    event.stopPropagation();
  });
  field.addEventListener('blur', () => end(true));
  item.replaceChildren(field);
  field.select();
}

function download(conversation) {
  const link = el('a');
  link.href = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: 'application/json' }));
  link.download = `${titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 60) || 'conversation'}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function discard(conversation) {
  chat.stop(conversation.id);
  conversations = conversations.filter((other) => other !== conversation);
  conversation.deleted = true;
  attempt(store.remove(conversation.id));
  if (chat.conversation === conversation) show(fresh());
  refresh();
  toast('Conversation deleted.', 'Undo', () => {
    delete conversation.deleted;
    keepIt(conversation);
    show(conversation);
  });
}

/** Keeps a conversation, at the top of the list if it is new. */
function keepIt(conversation) {
  if (conversation.deleted) return;
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  conversations.sort((a, b) => b.updated - a.updated);
  attempt(store.save(conversation));
}

async function attempt(promise) {
  try {
    await promise;
  } catch (error) {
    toast(`The browser could not store the conversation (${error?.message ?? 'it gives no reason'}). Export it to keep it.`);
  }
}

chat.onchange = (conversation) => {
  keepIt(conversation);
  refresh();
};

// ---- writing

function grow() {
  if (editing === null) store.preferences.set('draft', words.value);
  words.style.height = 'auto';
  words.style.height = `${Math.min(words.scrollHeight, innerHeight * 0.4)}px`;
  $('send').disabled = words.value.trim() === '';
}

function submit() {
  const text = words.value.trim();
  if (text === '' || chat.busy()) return;
  if (server.state === 'locked') {
    sendWhenOpen = true;
    askForKey();
    return;
  }
  const instead = editing ?? undefined;
  if (editing === null) words.value = '';
  cancelEdit();
  grow();
  chat.send(text, instead);
}

chat.onedit = (index) => {
  if (chat.busy()) return;
  if (editing === null) draft = words.value;
  editing = index;
  words.value = chat.conversation.messages[index].content;
  $('editing').hidden = false;
  grow();
  words.focus();
};

function cancelEdit() {
  if (editing === null) return;
  editing = null;
  words.value = draft;
  $('editing').hidden = true;
  grow();
}

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  submit();
});
words.addEventListener('input', grow);
words.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  } else if (event.key === 'ArrowUp' && words.value === '') {
    const last = chat.conversation.messages.findLastIndex(({ role }) => role === 'user');
    if (last >= 0) {
      event.preventDefault();
      chat.onedit(last);
    }
  }
});

// ---- settings

const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
const form = $('settings').querySelector('form');

function summary(settings) {
  const names = { temperature: 'temperature', top_p: 'top p', top_k: 'top k', min_p: 'min p', max_tokens: 'max tokens', seed: 'seed' };
  const parts = NUMBERS.filter((name) => typeof settings[name] === 'number').map((name) => `${names[name]} ${settings[name]}`);
  if (settings.system) parts.unshift('system prompt');
  if (settings.think) parts.push(`reasoning ${settings.think}`);
  return parts.length > 0 ? parts.join(', ') : 'Default settings';
}

function openSettings() {
  const { settings } = chat.conversation;
  form.reset();
  form.elements.system.value = settings.system ?? '';
  for (const name of NUMBERS) form.elements[name].value = settings[name] ?? '';
  form.elements.think.value = settings.think ?? '';
  $('settings').showModal();
}

$('settings').addEventListener('close', () => {
  const settings = {};
  for (const name of NUMBERS) {
    const field = form.elements[name];
    // What the browser itself calls invalid is not sent.
    if (field.value !== '' && field.validity.valid) settings[name] = field.valueAsNumber;
  }
  if (form.elements.system.value.trim()) settings.system = form.elements.system.value.trim();
  if (form.elements.think.value) settings.think = form.elements.think.value;
  chat.conversation.settings = settings;
  const { system, seed, ...lasting } = settings;
  store.preferences.set('settings', lasting);
  if (chat.conversation.messages.length > 0) keepIt(chat.conversation);
  refresh();
});

// ---- the server

/** Whether the message in the field is to be sent once the server has a key. */
let sendWhenOpen = false;

function askForKey() {
  $('refused').hidden = !server.refused;
  if (!$('key').open) $('key').showModal();
}

$('key').addEventListener('close', () => {
  const field = $('key').querySelector('input');
  const value = field.value.trim();
  field.value = '';
  if ($('key').returnValue === 'use' && value !== '') setKey(value);
  else sendWhenOpen = false;
  $('key').returnValue = '';
});

/** What the banner says in a state, with the label and the name of what can be done about it. */
const STATES = {
  loading: () => [`Loading the model…${server.loaded === null ? '' : ` ${Math.floor(100 * server.loaded)}%.`} You can write already: the message is sent when the model is ready.`],
  failing: () => ['The server cannot answer at the moment. Its log may say why. Trying again…'],
  leaving: () => ['The server is shutting down. The page reconnects when it is back.'],
  gone: () => ['The server does not answer: check that forebay serve is running. Reconnecting…'],
  locked: () => ['This server needs an API key.', 'Enter the key', 'key'],
};

let before = server.state;
server.addEventListener('change', () => {
  const { state, model } = server;
  const [message = '', label, action] = STATES[state]?.() ?? [];
  const [text, button] = $('banner').children;
  $('banner').hidden = message === '';
  $('banner').dataset.state = state;
  text.textContent = message;
  button.hidden = !label;
  button.textContent = label ?? '';
  button.dataset.action = action ?? '';
  if (model) $('name').textContent = model;
  machine.serve(state === 'ready', state === 'loading' ? 'Waiting for the model to load.' : 'Not connected.');
  if (state === 'locked' && (before !== 'locked' || server.refused)) askForKey();
  if (state === 'ready' && before !== 'ready') {
    if (chat.failure?.status === 401) chat.regenerate();
    else if (sendWhenOpen) submit();
    sendWhenOpen = false;
  }
  before = state;
  refresh();
});

// ---- panels

const wide = matchMedia('(min-width: 1100px)');
const middle = matchMedia('(min-width: 760px)');
const panels = {
  conversations: { node: $('conversations'), fixed: () => middle.matches },
  machine: { node: $('machine'), fixed: () => wide.matches },
};

/** Opens or closes a panel at the side. Where there is no room beside the conversation it lies over it. */
function drawer(name, open) {
  const { node, fixed } = panels[name];
  node.dataset.open = open;
  node.inert = !open && !(name === 'conversations' && fixed());
  const over = Object.values(panels).find((panel) => panel.node.dataset.open === 'true' && !panel.fixed());
  $('shade').hidden = !over;
  document.querySelector('main').inert = Boolean(over);
  if (open && over) node.querySelector('button:not([hidden])')?.focus();
  if (name === 'machine') {
    if (fixed()) store.preferences.set('machine', open);
    machine.watch(open);
    document.body.dataset.machine = open;
  }
}

const isOpen = (name) => panels[name].node.dataset.open === 'true';

function arrange() {
  drawer('conversations', false);
  drawer('machine', wide.matches && store.preferences.get('machine', true));
}

for (const query of [wide, middle]) query.addEventListener('change', arrange);
$('shade').addEventListener('click', () => {
  for (const name of Object.keys(panels)) if (!panels[name].fixed()) drawer(name, false);
});

machine.onlost = () => server.check();

// ---- everything else

const deeds = {
  new: () => {
    show(fresh());
    drawer('conversations', false);
    words.focus();
  },
  conversations: () => {
    drawer('conversations', !isOpen('conversations'));
    if (!isOpen('conversations')) document.querySelector('main [data-action="conversations"]').focus();
  },
  machine: () => {
    drawer('machine', !isOpen('machine'));
    if (!isOpen('machine')) document.querySelector('main [data-action="machine"]').focus();
  },
  settings: openSettings,
  reset: () => {
    for (const name of ['system', ...NUMBERS]) form.elements[name].value = '';
    form.elements.think.value = '';
  },
  stop: () => chat.stop(),
  'cancel-edit': cancelEdit,
  'close-key': () => $('key').close(),
  key: askForKey,
  drop: () => chat.drop(),
};
document.addEventListener('click', (event) => deeds[event.target.closest('[data-action]')?.dataset.action]?.());

document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || document.querySelector('dialog[open]')) return;
  const over = Object.keys(panels).find((name) => isOpen(name) && !panels[name].fixed());
  if (over) deeds[over]();
  else if (editing !== null) cancelEdit();
  else chat.stop();
});

addEventListener('pagehide', () => {
  if (chat.busy()) keepIt(chat.conversation);
});

let vanish = 0;
function toast(message, label, action) {
  const [text, button] = $('toast').children;
  text.textContent = message;
  button.hidden = !label;
  button.textContent = label ?? '';
  button.onclick = () => {
    $('toast').hidden = true;
    action();
  };
  $('toast').hidden = false;
  clearTimeout(vanish);
  vanish = setTimeout(() => {
    $('toast').hidden = true;
  }, 8000);
}

conversations = await store.all().catch(() => []);
const last = store.preferences.get('open', null);
show(conversations.find(({ id }) => id === last) ?? fresh());
if (!(await store.lasting)) $('kept').textContent = 'This browser stores nothing: conversations are lost when the page is closed.';
arrange();
words.value = store.preferences.get('draft', '');
grow();
words.focus();
await server.check();
