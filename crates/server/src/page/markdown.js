// Markdown into nodes. Nothing a model writes is ever parsed as HTML: every character ends in a text node, or in
// the address of a link whose scheme was checked.

/** Quotes, lists and emphasis nested deeper than this stay text. */
const DEPTH = 16;

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/**
 * Text that comes piece by piece, shown in `root`. Blocks that are over are never touched again; only the last one
 * is built anew as it grows, and code, which can be long, grows by its new lines alone.
 */
export class Markdown {
  #root;
  /** What no finished block has used yet. */
  #tail = '';
  /** Nodes of the tail. */
  #live = [];
  /** The block of code that is open: its fence, and where lines go. */
  #code = null;

  constructor(root) {
    this.#root = root;
  }

  push(text) {
    this.#tail += text.replaceAll('\r', '');
    this.#settle(false);
  }

  /** No more will come. */
  finish() {
    this.#settle(true);
  }

  #settle(over) {
    for (const node of this.#live.splice(0)) node.remove();
    while (!this.#code || this.#grow(over)) {
      const lines = this.#tail.split('\n');
      // The last line may become something else as it grows, and change what stands before it.
      const sure = over ? lines.length : lines.length - 1;
      const found = [...blocks(lines)];
      const done = over ? found.length : finished(found, sure);
      const open = found[done];
      for (const block of found.slice(0, done)) this.#root.append(block.build(0, false));
      if (open?.fence && open.from < sure && done === found.length - 1) {
        const { node, code } = codeBlock(open.info, '');
        this.#root.append(node);
        this.#code = { fence: open.fence, last: code.appendChild(new Text()) };
        this.#tail = rest(this.#tail, open.from + 1);
        continue;
      }
      this.#tail = over ? '' : rest(this.#tail, open?.from ?? found.at(-1)?.to ?? sure);
      this.#live = found.slice(done).map((block) => block.build(0, true));
      this.#root.append(...this.#live);
      return;
    }
  }

  /** Adds whole lines to the open block of code; true when it is over. */
  #grow(over) {
    const { fence, last } = this.#code;
    const tail = this.#tail;
    // Lines of code end at `until`; what comes after them begins at `next`.
    let [until, next, ended] = [0, 0, false];
    for (let end; !ended && (end = tail.indexOf('\n', next)) >= 0; next = end + 1) {
      ended = closes(tail.slice(next, end), fence);
      until = ended ? until : end + 1;
    }
    if (over && !ended) {
      if (!closes(tail.slice(next), fence)) until = tail.length;
      [next, ended] = [tail.length, true];
    }
    if (until > 0) last.before(tail.slice(0, until));
    this.#tail = tail.slice(next);
    if (ended) {
      last.remove();
      this.#code = null;
    } else {
      // What may become the closing fence is not shown before it is known.
      last.data = /^ {0,3}[`~]+$/.test(this.#tail) ? '' : this.#tail;
    }
    return ended;
  }
}

/** How many of these blocks nothing that comes can change, if lines before `sure` are whole. */
function finished(found, sure) {
  const last = found.at(-1);
  if (!last) return 0;
  if (last.closed && last.to <= sure) return found.length;
  const touched = last.from >= sure && found.length > 1 && !found.at(-2).closed;
  return found.length - (touched ? 2 : 1);
}

/** A whole text. */
export function render(root, text) {
  const markdown = new Markdown(root);
  markdown.push(text);
  markdown.finish();
}

/** A line with spaces for the tabs before its text. */
const flat = (line) => (/^ *\t/.test(line) ? line.replace(/^[ \t]+/, (space) => space.replaceAll('\t', '    ')) : line);

/** The text from a line on. */
function rest(text, line) {
  let at = 0;
  for (; line > 0; line--) {
    const end = text.indexOf('\n', at);
    if (end < 0) return '';
    at = end + 1;
  }
  return text.slice(at);
}

const blank = (line) => line.trim() === '';
const indent = (line) => line.length - line.trimStart().length;
const closes = (line, fence) => {
  const text = line.trim();
  return text.length >= fence.length && text[0] === fence[0] && text === fence[0].repeat(text.length) && indent(line) < 4;
};

function isTable(lines, at) {
  return at + 1 < lines.length && lines[at].includes('|') && lines[at + 1].includes('-')
    && DELIMITERS.test(flat(lines[at + 1])) && cells(lines[at]).length === cells(lines[at + 1]).length;
}

/** Whether a paragraph ends before this line. */
function interrupts(lines, at) {
  const line = flat(lines[at]);
  const item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, at)
    || (item && item[3] !== '' && (item[2].length === 1 || item[2].startsWith('1')));
}

/** The blocks of some lines: where each begins and ends, and how it is built. */
function* blocks(lines) {
  let at = 0;
  while (at < lines.length) {
    const from = at;
    const line = flat(lines[at]);
    let match;
    if (blank(line)) {
      at++;
    } else if ((match = FENCE.exec(line))) {
      const [, fence, info] = match;
      const space = indent(line);
      at++;
      while (at < lines.length && !closes(lines[at], fence)) at++;
      const closed = at < lines.length;
      const code = lines.slice(from + 1, at).map((l) => l.slice(Math.min(space, indent(l)))).join('\n');
      at += closed ? 1 : 0;
      yield { from, to: at, fence, info, closed, build: () => codeBlock(info, closed && code ? `${code}\n` : code).node };
    } else if ((match = HEADING.exec(line))) {
      at++;
      const [, marks, text = ''] = match;
      // The page has the first two levels for itself.
      const level = Math.min(marks.length + 2, 6);
      yield { from, to: at, build: (depth, live) => {
        const node = el(`h${level}`);
        node.dataset.level = marks.length;
        return inline(node, text.trim().replace(/(^| )#{1,9}$/, ''), live);
      } };
    } else if (RULE.test(line)) {
      at++;
      yield { from, to: at, build: () => el('hr') };
    } else if (QUOTE.test(line)) {
      while (at < lines.length && (QUOTE.test(flat(lines[at])) || (!blank(lines[at]) && !interrupts(lines, at)))) at++;
      const inner = lines.slice(from, at).map((l) => flat(l).replace(QUOTE, ''));
      yield { from, to: at, build: (depth, live) => container(el('blockquote'), inner, depth, live, false) };
    } else if (ITEM.test(line)) {
      const list = readList(lines, at);
      at = list.to;
      yield { from, to: at, build: (depth, live) => buildList(list, depth, live) };
    } else if (isTable(lines, at)) {
      at += 2;
      while (at < lines.length && !blank(lines[at]) && lines[at].includes('|')) at++;
      const rows = lines.slice(from, at);
      yield { from, to: at, build: (depth, live) => buildTable(rows, live) };
    } else {
      at++;
      while (at < lines.length && !blank(lines[at]) && !interrupts(lines, at)) at++;
      const text = lines.slice(from, at).map((l) => l.trimStart()).join('\n').trimEnd();
      yield { from, to: at, paragraph: true, build: (depth, live) => inline(el('p'), text, live) };
    }
  }
}

/** Blocks inside a quote or an item. Tight items have their text without paragraphs. */
function container(node, lines, depth, live, tight) {
  if (depth >= DEPTH) {
    node.append(lines.join('\n'));
    return node;
  }
  for (const block of blocks(lines)) {
    const built = block.build(depth + 1, live);
    if (tight && block.paragraph) node.append(...built.childNodes);
    else node.append(built);
  }
  return node;
}

function readList(lines, at) {
  const [, space, mark] = ITEM.exec(flat(lines[at]));
  const base = space.length;
  const kind = mark.at(-1);
  const list = { ordered: mark.length > 1, start: parseInt(mark, 10), items: [], loose: false, to: at };
  let content = 0;
  let gap = false;
  for (; at < lines.length; at++) {
    const line = flat(lines[at]);
    const item = ITEM.exec(line);
    if (blank(line)) {
      gap = true;
      list.items.at(-1)?.push('');
      continue;
    }
    // Nested lists are often indented by less than the text of their item.
    const inside = list.items.length > 0 && (indent(line) >= content || (item && indent(line) >= base + 2));
    if (inside) {
      list.loose ||= gap && !item;
      list.items.at(-1).push(line.slice(Math.min(content, indent(line))));
    } else if (item && item[2].at(-1) === kind && !RULE.test(line) && item[1].length <= base + 1) {
      list.loose ||= gap;
      content = item[0].length - (item[3].length > 4 ? item[3].length - 1 : 0) + (item[3] === '' ? 1 : 0);
      list.items.push([line.slice(Math.min(content, line.length))]);
    } else if (list.items.length > 0 && !gap && !interrupts(lines, at)) {
      list.items.at(-1).push(line.trimStart());
    } else {
      break;
    }
    gap = false;
    list.to = at + 1;
  }
  return list;
}

function buildList({ ordered, start, items, loose }, depth, live) {
  const node = el(ordered ? 'ol' : 'ul');
  if (ordered && start !== 1) node.start = start;
  for (const lines of items) {
    const item = el('li');
    const task = /^\[([ xX])\] /.exec(lines[0]);
    if (task) {
      const box = el('input');
      box.type = 'checkbox';
      box.disabled = true;
      box.checked = task[1] !== ' ';
      item.className = 'task';
      item.append(box, ' ');
    }
    const text = task ? [lines[0].slice(4), ...lines.slice(1)] : lines;
    node.append(container(item, text, depth, live, !loose));
  }
  return node;
}

/** The cells of a row: what stands between bars that are neither escaped nor inside code. */
function cells(row) {
  const found = [];
  let cell = '';
  let code = false;
  for (let i = 0; i < row.length; i++) {
    if (row[i] === '\\' && row[i + 1] === '|') {
      cell += '|';
      i++;
    } else if (row[i] === '|' && !code) {
      found.push(cell);
      cell = '';
    } else {
      code = row[i] === '`' ? !code && row.indexOf('`', i + 1) >= 0 : code;
      cell += row[i];
    }
  }
  found.push(cell);
  if (found[0].trim() === '') found.shift();
  if (found.length > 0 && found.at(-1).trim() === '') found.pop();
  return found.map((text) => text.trim());
}

function buildTable(rows, live) {
  const [head, delimiters, ...body] = rows.map(cells);
  const aligns = delimiters.map((d) => (d.endsWith(':') ? (d.startsWith(':') ? 'center' : 'right') : ''));
  const row = (tag, texts) => {
    const node = el('tr');
    for (const [i, align] of aligns.entries()) {
      const cell = inline(el(tag), texts[i] ?? '', live);
      if (align) cell.style.textAlign = align;
      node.append(cell);
    }
    return node;
  };
  const table = el('table');
  table.append(el('thead', row('th', head)), el('tbody', ...body.map((texts) => row('td', texts))));
  const frame = el('div', table);
  frame.className = 'table';
  // A wide table scrolls, and whoever has no mouse must be able to.
  frame.tabIndex = 0;
  frame.role = 'region';
  frame.ariaLabel = 'Table';
  return frame;
}

function codeBlock(info, text) {
  const language = info.trim().split(/\s/)[0].slice(0, 30);
  const code = el('code', text);
  const pre = el('pre', code);
  pre.tabIndex = 0;
  const copy = el('button', 'Copy');
  copy.type = 'button';
  copy.dataset.action = 'copy-code';
  const head = el('div', el('span', language || 'text'), copy);
  const node = el('div', head, pre);
  node.className = 'code';
  return { node, code };
}

/** Adds a text with emphasis, code and links to a node. While it grows, emphasis that is not closed yet is shown. */
function inline(node, text, live) {
  const SPECIAL = /[\\`*_~[\]!<\n]|https?:\/\//g;
  /** Elements that are open, each with the mark that opened it. */
  const open = [{ node }];
  const unmatched = new Set();
  /** Text that is not in a node yet. */
  let words = '';
  const flush = () => {
    if (words) open.at(-1).node.append(words);
    words = '';
  };
  const add = (piece) => {
    if (typeof piece === 'string') {
      words += piece;
    } else {
      flush();
      open.at(-1).node.append(piece);
    }
  };
  /** An element that nobody closed is its mark and what it holds. */
  const dissolve = (frame) => frame.node.replaceWith(frame.mark, ...frame.node.childNodes);
  const begin = (mark, tag) => {
    const child = el(tag);
    add(child);
    open.push({ mark, node: child });
  };
  const end = (index) => {
    flush();
    for (const frame of open.splice(index + 1)) dissolve(frame);
    return open.pop();
  };
  const lastOf = (test) => open.findLastIndex((frame, i) => i > 0 && test(frame));
  const at = (pattern, i) => {
    pattern.lastIndex = i;
    return pattern.exec(text);
  };

  let i = 0;
  while (i < text.length) {
    const found = at(SPECIAL, i);
    if (!found) break;
    add(text.slice(i, found.index));
    i = found.index;
    const char = text[i];
    let match;
    if (char === '\n') {
      add(el('br'));
      i++;
    } else if (char === '\\' && (match = at(/\\([!-/:-@[-`{-~\n])/y, i))) {
      add(match[1] === '\n' ? el('br') : match[1]);
      i += 2;
    } else if (char === '`') {
      const ticks = at(/`+/y, i)[0];
      const close = unmatched.has(ticks.length) ? -1 : closing(text, ticks, i + ticks.length);
      if (close < 0) {
        unmatched.add(ticks.length);
        add(ticks);
        i += ticks.length;
      } else {
        const code = text.slice(i + ticks.length, close).replaceAll('\n', ' ');
        add(el('code', /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code));
        i = close + ticks.length;
      }
    } else if (char === '*' || char === '_' || char === '~') {
      let [marks] = at(char === '~' ? /~+/y : char === '*' ? /\*+/y : /_+/y, i);
      const before = text[i - 1] ?? ' ';
      const after = text[i + marks.length] ?? ' ';
      i += marks.length;
      const word = /[\p{L}\p{N}]/u;
      let canOpen = !/\s/.test(after);
      let canClose = !/\s/.test(before);
      if (char === '_') {
        canOpen &&= !word.test(before);
        canClose &&= !word.test(after);
      }
      if (marks.length > 3 || (char === '~' && marks.length !== 2)) {
        add(marks);
        continue;
      }
      while (canClose && marks !== '') {
        const index = lastOf((frame) => frame.mark[0] === char);
        if (index < 0 || open[index].mark.length > marks.length) break;
        marks = marks.slice(open[index].mark.length);
        end(index);
      }
      if (marks !== '' && canOpen && open.length < DEPTH) {
        if (char === '~') begin('~~', 'del');
        if (char !== '~' && marks.length >= 2) begin(char + char, 'strong');
        if (char !== '~' && marks.length % 2 === 1) begin(char, 'em');
      } else {
        add(marks);
      }
    } else if (char === '[' || (char === '!' && text[i + 1] === '[')) {
      const mark = char === '[' ? '[' : '![';
      // A picture would be a request to somebody else: it is shown as a link.
      if (open.length < DEPTH) begin(mark, 'a');
      else add(mark);
      i += mark.length;
    } else if (char === ']') {
      const index = lastOf((frame) => frame.mark.endsWith('['));
      match = index < 0 ? null
        : at(/\]\(\s{0,9}<?((?:[^\s<>()]|\([^\s<>()]{0,500}\)){1,2000})>?(?:\s{1,9}(?:"[^"\n]{0,300}"|'[^'\n]{0,300}'))?\s{0,9}\)/y, i);
      const href = match && safe(match[1]);
      if (href && !open.slice(0, index).some((frame) => frame.mark?.endsWith('['))) {
        const { node: link } = end(index);
        anchor(link, href);
        if (link.childNodes.length === 0) link.append(href);
        i += match[0].length;
      } else {
        if (index >= 0) dissolve(end(index));
        add(']');
        i++;
      }
    } else if (char === '<' && (match = at(/<br ?\/?>/iy, i))) {
      add(el('br'));
      i += match[0].length;
    } else if (char === '<' && (match = at(/<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy, i)) && safe(match[1])) {
      add(anchor(el('a', match[1]), safe(match[1])));
      i += match[0].length;
    } else if (char === 'h' && lastOf((frame) => frame.mark.endsWith('[')) < 0) {
      let [address] = at(/https?:\/\/[^\s<>"'`|]{0,2000}/y, i);
      address = address.replace(/[.,;:!?*_~\]]+$/, '');
      if (address.endsWith(')') && !address.includes('(')) address = address.replace(/\)+[.,;:!?]*$/, '');
      const href = safe(address);
      add(href ? anchor(el('a', address), href) : address);
      i += address.length;
    } else {
      add(found[0]);
      i += found[0].length;
    }
  }
  add(text.slice(i));
  flush();
  for (const frame of open.splice(1).reverse()) {
    if (!live || frame.mark.endsWith('[')) dissolve(frame);
  }
  node.normalize();
  return node;
}

/** Where a run of exactly these ticks begins. */
function closing(text, ticks, from) {
  for (let at = text.indexOf(ticks, from); at >= 0; at = text.indexOf(ticks, at)) {
    let end = at;
    while (text[end] === '`') end++;
    if (end - at === ticks.length) return at;
    at = end;
  }
  return -1;
}

/** The address, if it is one that may be followed. */
function safe(address) {
  try {
    const url = new URL(address);
    return ['http:', 'https:', 'mailto:'].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(link, href) {
  link.href = href;
  link.target = '_blank';
  link.rel = 'noopener noreferrer';
  return link;
}

function el(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}
